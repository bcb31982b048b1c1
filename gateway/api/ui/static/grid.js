// One pool of blocks as a grid of cells on a canvas.

import { colourOf, fit } from "./dom.js";
import { STATUS } from "./state.js";

const MIN_CELL = 5;
const MAX_CELL = 56;
// The margin around the cells, for rings and arrow heads.
const MARGIN = 8;
// The smallest cell with room for a block's number, and the room for the number.
const MIN_NUMBERED = 26;
const NUMBER_HEIGHT = 14;
// The maximum size of a canvas in screen pixels; browsers draw nothing on larger ones.
const MAX_HEIGHT = 16_000;
const FLASH_MS = 900;
// A viewer cannot follow more marks at once.
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

  // Chooses the largest size with which all cells fit into the height, if possible. `blocks` are the numbers of the
  // shown blocks; null for all `size` blocks.
  layout(size, blocks, outerWidth, height) {
    const isSame = size === this.size && blocks === this.blocks;
    if (isSame && outerWidth === this.outerWidth && height === this.height) return;
    const width = outerWidth - 2 * MARGIN;
    Object.assign(this, { size, blocks, outerWidth, width, height, places: null });
    if (blocks !== null) {
      this.places = new Map();
      blocks.forEach((block, place) => this.places.set(block, place));
      size = blocks.length;
    }
    let cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(Math.sqrt((width * height) / Math.max(size, 1)))));
    while (cell > MIN_CELL && Math.ceil(size / Math.floor(width / cell)) * cell > height) cell -= 1;
    const scale = devicePixelRatio || 1;
    while (cell > 2 && Math.ceil(size / Math.floor(width / cell)) * cell * scale > MAX_HEIGHT) cell -= 1;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(width / cell));
    this.rows = Math.ceil(size / this.columns);
    const [wide, high] = [this.columns * cell + 2 * MARGIN, Math.max(1, this.rows * cell) + 2 * MARGIN];
    this.context = fit(this.canvas, wide, high);
    this.context.translate(MARGIN, MARGIN);
    this.readColours();
  }

  readColours() {
    const names = ["surface", "line", "cached", "ink", "muted", "paper"];
    this.colours = Object.fromEntries(names.map((name) => [name, colourOf(`--${name}`)]));
  }

  // The height of all cells, in pixels.
  get drawnHeight() {
    return this.rows * this.cell;
  }

  // The number of shown blocks.
  get count() {
    return this.blocks?.length ?? this.size;
  }

  // The block at a place, and the place of a block; null if there is none, or it is not shown.
  blockIn(place) {
    if (place < 0 || place >= this.count) return null;
    return this.blocks === null ? place : this.blocks[place];
  }

  placeOf(block) {
    if (this.places !== null) return this.places.get(block) ?? null;
    return block < this.size ? block : null;
  }

  blockAt(x, y) {
    const column = Math.floor((x - MARGIN) / this.cell), row = Math.floor((y - MARGIN) / this.cell);
    return column >= 0 && column < this.columns ? this.blockIn(row * this.columns + column) : null;
  }

  corner(block) {
    const place = this.placeOf(block);
    return [(place % this.columns) * this.cell, Math.floor(place / this.columns) * this.cell];
  }

  centre(block) {
    return this.corner(block).map((each) => each + this.cell / 2);
  }

  // Draws a ring around `block`, with an arrow from the block `from`, if given. It fades, unless `stays` is set.
  mark(block, from, stays) {
    if (this.marks.length > MAX_MARKS) this.marks.shift();
    this.marks.push({ block, from, until: stays ? Infinity : performance.now() + FLASH_MS });
  }

  draw(memory, pool) {
    const started = performance.now();
    const { context, cell } = this;
    context.clearRect(-MARGIN, -MARGIN, this.columns * cell + 2 * MARGIN, this.rows * cell + 2 * MARGIN);
    const gap = cell >= 12 ? 2 : 1, side = cell - gap;
    const size = memory.shape.blockSize;
    for (let place = 0; place < this.count; place += 1) {
      const block = this.blocks === null ? place : this.blocks[place];
      const x = (place % this.columns) * cell, y = Math.floor(place / this.columns) * cell;
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
    if (pool.refs[block]) this.pin(x, y, side);
    if (side >= MIN_NUMBERED) this.number(block, x, y, isNamed || pool.refs[block] ? colours.ink : colours.muted);
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
    if (this.pinned.size && pool.isGpu && this.pinned.has(block)) this.pin(x, y, side);
    // Only large cells have room for a number below the circle of a shared block.
    if (isDim || side < (pool.refs[block] > 1 ? 40 : MIN_NUMBERED)) return;
    // On the pale part if that has room, else on the solid part, so that the number is on one colour.
    const pale = side - height, isOnPale = pale >= NUMBER_HEIGHT;
    context.globalAlpha = 1;
    const ink = isOnPale || fade < 1 ? colours.ink : this.palette.inkOn(owner);
    this.number(block, x, isOnPale ? y : y + pale, ink);
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

  pin(x, y, side) {
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
    if (this.cursor === null || this.placeOf(this.cursor) === null) return;
    const { context, cell } = this, [x, y] = this.corner(this.cursor);
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 2;
    context.strokeRect(x, y, cell - gap, cell - gap);
  }

  drawMarks(now, gap) {
    const { context, cell } = this;
    this.marks = this.marks.filter((each) => each.until > now && each.block < this.size);
    const shown = this.marks.filter((each) => this.placeOf(each.block) !== null);
    const isArrow = ({ from }) => from !== null && this.placeOf(from) !== null;
    const arrows = new Set(shown.filter(isArrow).slice(-MAX_ARROWS));
    context.strokeStyle = this.colours.ink;
    for (const mark of shown) {
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
    // Curved, so that arrows along a row do not overlap.
    const { context } = this, bend = 0.18;
    // The curve lies within its three points, so it is never cut off at the edge of the canvas.
    const within = (value, end) => Math.max(-MARGIN, Math.min(end + MARGIN, value));
    const middleX = within((fromX + toX) / 2 - (toY - fromY) * bend, this.columns * this.cell);
    const middleY = within((fromY + toY) / 2 + (toX - fromX) * bend, this.rows * this.cell);
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
