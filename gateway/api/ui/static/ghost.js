// The same load under Orca (Max), as a grid of cells: each sequence has one region, reserved for the model's maximum
// length. Its solid cells contain tokens.

import { colourOf, fit } from "./dom.js";

const [MIN_CELL, MAX_CELL] = [2, 24];

export class Ghost {
  constructor(canvas, palette) {
    this.canvas = canvas;
    this.palette = palette;
  }

  // Draws `gains` (gains.js). Each cell takes `tokens` tokens of all layers, or a block of a state.
  draw(gains, tokens, width, height) {
    const { region, regions } = gains.orca;
    const shown = gains.sequences.slice(0, regions), count = shown.length * region;
    let cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(Math.sqrt((width * height) / Math.max(1, count)))));
    while (cell > MIN_CELL && Math.ceil(count / Math.floor(width / cell)) * cell > height) cell -= 1;
    const columns = Math.max(1, Math.floor(width / cell)), rows = Math.min(
      Math.ceil(count / columns), Math.floor(height / cell),
    );
    const context = fit(this.canvas, width, Math.max(1, rows * cell));
    const side = cell - (cell >= 12 ? 2 : cell > 2 ? 1 : 0);
    const line = colourOf("--muted");
    shown.forEach((sequence, place) => {
      context.fillStyle = this.palette.of(sequence);
      for (let index = 0; index < region; index += 1) {
        const at = place * region + index, row = Math.floor(at / columns);
        if (row >= rows) return;
        const x = (at % columns) * cell, y = row * cell;
        const share = Math.min(1, Math.max(0, sequence.computed / tokens + sequence.state.length - index));
        const full = side < 8 ? (share > 0 ? side : 0) : Math.round(side * share);
        context.globalAlpha = 0.22;
        context.fillRect(x, y, side, side - full);
        context.globalAlpha = 1;
        context.fillRect(x, y + side - full, side, full);
        if (share === 0 && side >= 7) hatch(context, x, y, side, line);
      }
    });
  }
}

// Reserved cells without tokens.
function hatch(context, x, y, side, colour) {
  context.strokeStyle = colour;
  context.globalAlpha = 0.45;
  context.lineWidth = 0.75;
  context.beginPath();
  context.moveTo(x, y + side);
  context.lineTo(x + side, y);
  context.stroke();
}
