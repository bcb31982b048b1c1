// One pool of blocks as a grid of cells on a canvas.

import { colourOf, fit } from "./dom.js";
import { STATUS } from "./state.js";

const MIN_CELL = 5;
const MAX_CELL = 56;
// Of a canvas, in the screen's pixels; browsers draw nothing on larger ones.
const MAX_HEIGHT = 16_000;
const FLASH_MS = 900;
// With more of them at once, none can be followed.
const MAX_ARROWS = 8;
const MAX_MARKS = 96;
const DARK = "#16181b";

export class Grid {
  constructor(canvas, palette) {
    this.canvas = canvas;
    this.palette = palette;
    this.cell = MIN_CELL;
    this.columns = 1;
    this.cursor = null;
    this.highlighted = null;
    this.marks = [];
    this.drawMs = 0;
  }

  // Chooses the size of the cells: as large as all of them fit into the height, where they can.
  layout(size, width, height) {
    if (size === this.size && width === this.width && height === this.height) return;
    Object.assign(this, { size, width, height });
    let cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(Math.sqrt((width * height) / Math.max(size, 1)))));
    while (cell > MIN_CELL && Math.ceil(size / Math.floor(width / cell)) * cell > height) cell -= 1;
    const scale = devicePixelRatio || 1;
    while (cell > 2 && Math.ceil(size / Math.floor(width / cell)) * cell * scale > MAX_HEIGHT) cell -= 1;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(width / cell));
    this.rows = Math.ceil(size / this.columns);
    this.context = fit(this.canvas, this.columns * cell, Math.max(1, this.rows * cell));
    this.readColours();
  }

  readColours() {
    const names = ["surface", "line", "cached", "ink", "muted", "paper"];
    this.colours = Object.fromEntries(names.map((name) => [name, colourOf(`--${name}`)]));
  }

  blockAt(x, y) {
    const column = Math.floor(x / this.cell);
    const block = Math.floor(y / this.cell) * this.columns + column;
    return column >= 0 && column < this.columns && block >= 0 && block < this.size ? block : null;
  }

  centre(block) {
    const x = (block % this.columns) * this.cell, y = Math.floor(block / this.columns) * this.cell;
    return [x + this.cell / 2, y + this.cell / 2];
  }

  // A ring around `block`, with an arrow from `from` where there is one. It fades, unless it stays.
  mark(block, from, stays) {
    if (this.marks.length > MAX_MARKS) this.marks.shift();
    this.marks.push({ block, from, until: stays ? Infinity : performance.now() + FLASH_MS });
  }

  draw(memory, pool) {
    const started = performance.now();
    const { context, cell } = this;
    context.clearRect(0, 0, this.columns * cell, this.rows * cell);
    const gap = cell >= 12 ? 2 : 1, side = cell - gap;
    const size = memory.shape.blockSize;
    for (let block = 0; block < pool.size; block += 1) {
      const x = (block % this.columns) * cell, y = Math.floor(block / this.columns) * cell;
      const owner = pool.owners[block] ? memory.sequences.get(pool.owners[block]) : undefined;
      const isDim = this.highlighted !== null && !this.highlighted.has(block);
      context.globalAlpha = isDim ? 0.18 : 1;
      if (owner === undefined) this.drawUnowned(memory, pool, block, x, y, side);
      else this.drawOwned(pool, block, owner, memory.filled(pool, block) / size, x, y, side, isDim);
    }
    context.globalAlpha = 1;
    this.drawCursor(gap);
    const isMoving = this.drawMarks(started, gap);
    this.drawMs = performance.now() - started;
    return isMoving;
  }

  drawUnowned(memory, pool, block, x, y, side) {
    const { context, colours } = this;
    const isNamed = memory.isNamed(pool, block);
    context.fillStyle = isNamed || pool.refs[block] ? colours.cached : colours.surface;
    context.fillRect(x, y, side, side);
    if (isNamed && side >= 9) this.stripe(x, y, side);
    if (pool.refs[block]) this.corner(x, y, side);
    if (side >= 26) this.number(block, x, y, colours.muted);
  }

  drawOwned(pool, block, owner, share, x, y, side, isDim) {
    const { context, colours } = this;
    const fade = isDim ? 0.18 : owner.status === STATUS.finished ? 0.4 : 1;
    context.fillStyle = this.palette.of(owner);
    const height = side < 8 ? side : Math.round(side * share);
    if (height < side) {
      context.globalAlpha = fade * 0.28;
      context.fillRect(x, y, side, side - height);
    }
    context.globalAlpha = fade;
    context.fillRect(x, y + side - height, side, height);
    if (owner.status === STATUS.swapped && side >= 6) this.stripe(x, y, side);
    if (pool.refs[block] > 1) this.shared(pool.refs[block], x, y, side);
    if (this.pinned.size && pool.isGpu && this.pinned.has(block)) this.corner(x, y, side);
    // Below the circle of a shared block there is room for a number in large cells alone.
    if (side < (pool.refs[block] > 1 ? 40 : 26)) return;
    this.number(block, x, y, share > 0.7 ? this.palette.inkOn(owner) : colours.ink);
  }

  // The blocks that pins hold.
  set pins(pins) {
    this.pinned = pins;
  }

  shared(count, x, y, side) {
    const { context } = this;
    if (side < 14) {
      const dot = Math.max(2, Math.round(side * 0.4));
      context.fillStyle = "#fff";
      context.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
      return;
    }
    const radius = Math.min(9, side * 0.3);
    context.fillStyle = "#fff";
    context.beginPath();
    context.arc(x + side / 2, y + side / 2, radius, 0, 2 * Math.PI);
    context.fill();
    context.fillStyle = DARK;
    context.font = `600 ${Math.round(radius * 1.25)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(String(count), x + side / 2, y + side / 2 + 0.5);
  }

  corner(x, y, side) {
    const { context } = this, length = Math.max(3, side * 0.4);
    context.fillStyle = this.colours.ink;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + length, y);
    context.lineTo(x, y + length);
    context.fill();
  }

  stripe(x, y, side) {
    const { context } = this;
    context.strokeStyle = this.colours.muted;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x + 1, y + side - 1);
    context.lineTo(x + side - 1, y + 1);
    context.stroke();
  }

  number(block, x, y, colour) {
    const { context } = this;
    context.fillStyle = colour;
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(String(block), x + 3, y + 3);
  }

  drawCursor(gap) {
    if (this.cursor === null || this.cursor >= this.size) return;
    const { context, cell } = this;
    const x = (this.cursor % this.columns) * cell, y = Math.floor(this.cursor / this.columns) * cell;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 2;
    context.strokeRect(x, y, cell - gap, cell - gap);
  }

  drawMarks(now, gap) {
    const { context, cell } = this;
    this.marks = this.marks.filter((each) => each.until > now && each.block < this.size);
    const arrows = new Set(this.marks.filter((each) => each.from !== null && each.from < this.size).slice(-MAX_ARROWS));
    context.strokeStyle = this.colours.ink;
    for (const mark of this.marks) {
      const { block, from, until } = mark, [x, y] = this.centre(block);
      context.globalAlpha = Math.min(1, (until - now) / FLASH_MS);
      context.lineWidth = 2;
      context.strokeRect(x - cell / 2 - 1, y - cell / 2 - 1, cell - gap + 2, cell - gap + 2);
      context.lineWidth = 1.25;
      if (arrows.has(mark)) this.arrow(this.centre(from), [x, y]);
    }
    context.globalAlpha = 1;
    return this.marks.some(({ until }) => until !== Infinity);
  }

  arrow([fromX, fromY], [toX, toY]) {
    // Bent, so that arrows along a row do not lie on one another.
    const { context } = this, bend = 0.18;
    const [middleX, middleY] = [(fromX + toX) / 2 - (toY - fromY) * bend, (fromY + toY) / 2 + (toX - fromX) * bend];
    const angle = Math.atan2(toY - middleY, toX - middleX), head = Math.max(5, Math.min(9, this.cell / 4));
    context.beginPath();
    context.moveTo(fromX, fromY);
    context.quadraticCurveTo(middleX, middleY, toX, toY);
    for (const turn of [2.6, -2.6]) {
      context.moveTo(toX, toY);
      context.lineTo(toX + head * Math.cos(angle + turn), toY + head * Math.sin(angle + turn));
    }
    context.stroke();
  }
}
