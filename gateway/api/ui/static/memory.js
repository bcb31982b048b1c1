// The view of memory: every block of the pools as a cell, who holds it, and what happens to it.

import { find, isCalm, make, whole } from "./dom.js";
import { Grid } from "./grid.js";
import { ask } from "./openai.js";
import { Palette } from "./palette.js";
import { STATUS, title } from "./state.js";

const MAX_LOG = 80;
const MAX_LISTED = 64;
const NAME_LENGTH = 14;
const MAX_CELLS = 256;
const READ_DELAY_MS = 120;
const STATUS_NAMES = { 1: "waits to fork", 2: "runs", 3: "swapped out", 4: "over" };

// A line about what happened.
function entryOf({ step, text }) {
  return make("li", {}, make("span", { className: "when" }, step ? `step ${whole(step)}` : "between steps"), text);
}

export class MemoryView {
  constructor(feed) {
    this.feed = feed;
    this.palette = new Palette();
    this.grids = {
      gpu: new Grid(find("#gpu-blocks"), this.palette), host: new Grid(find("#host-blocks"), this.palette),
    };
    this.replica = null;
    // While the view is paused: the place of the frame that is shown, the frame, and the memory as of it.
    this.shown = null;
    this.held = null;
    this.selected = null;
    this.isVisible = false;
    this.isDirty = true;
    this.readNumber = 0;
    this.reading = null;
    this.pointed = null;
    this.described = null;
    this.isSpoken = false;
    this.entries = new Map();
    this.more = make("li", { className: "hint" });
    feed.addEventListener("frame", ({ detail }) => this.take(detail));
    this.listen();
  }

  listen() {
    for (const [name, grid] of Object.entries(this.grids)) {
      const { canvas } = grid;
      canvas.addEventListener("pointermove", (event) => this.point(name, event));
      canvas.addEventListener("pointerdown", (event) => this.point(name, event));
      canvas.addEventListener("click", () => this.selectAtCursor(name));
      canvas.addEventListener("keydown", (event) => this.press(name, event));
      canvas.addEventListener("focus", () => this.pointTo(name, grid.cursor ?? 0));
    }
    find("#example").addEventListener("click", () => this.runExample());
    find("#pause").addEventListener("click", () => this.pause(this.shown === null));
    find("#back").addEventListener("click", () => this.go(-1));
    find("#forward").addEventListener("click", () => this.go(1));
    find("#moment").addEventListener("input", (event) => this.goTo(Number(event.target.value)));
    new ResizeObserver(() => this.change()).observe(find("#gpu-frame"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const grid of Object.values(this.grids)) grid.size = null;
      this.change();
    });
  }

  show(isVisible) {
    this.isVisible = isVisible;
    if (isVisible) this.change();
  }

  choose(replica) {
    if (replica === this.replica) return;
    this.replica = replica;
    this.shown = null;
    this.held = null;
    this.selected = null;
    // What was read and what happened is of the other one.
    this.forgetBlock();
    this.pointed = null;
    for (const grid of Object.values(this.grids)) grid.cursor = null;
    find("#block-title").textContent = "Point at a block";
    for (const place of ["#block-facts", "#block-owners"]) find(place).replaceChildren();
    this.tell(replica.history, replica.history.length - 1, []);
  }

  take(replica) {
    // A part of a large picture is no moment to stop at.
    if (replica !== this.replica || replica.frame === null || replica.frame !== replica.history.frames.at(-1)) return;
    if (this.shown !== null) {
      // Frames that are forgotten move the one that is shown. When it is forgotten itself, its picture stays.
      this.shown = Math.max(0, replica.history.frames.indexOf(this.held.frame));
    } else {
      this.mark(replica.frame.happened, false);
      find("#events").prepend(...replica.frame.happened.slice(-MAX_LOG).reverse().map(entryOf));
      while (find("#events").children.length > MAX_LOG) find("#events").lastChild.remove();
    }
    this.change();
  }

  // Time

  pause(isPaused) {
    const { history } = this.replica ?? {};
    if (!history?.length) return;
    if (isPaused) {
      this.goTo(history.length - 1);
      return;
    }
    this.shown = null;
    this.held = null;
    this.tell(history, history.length - 1, []);
  }

  go(frames) {
    if (!this.replica?.history.length) return;
    if (this.shown === null) this.pause(true);
    this.goTo(this.shown + frames);
  }

  goTo(index) {
    const { history } = this.replica ?? {};
    if (!history?.length) return;
    this.shown = Math.max(0, Math.min(history.length - 1, index));
    this.held = { frame: history.frames[this.shown], memory: history.at(this.shown) };
    this.tell(history, this.shown, this.held.frame.happened);
  }

  // What happened up to a frame; the blocks of `happened` stay marked.
  tell(history, index, happened) {
    for (const grid of Object.values(this.grids)) grid.marks = [];
    this.mark(happened, true);
    find("#events").replaceChildren(...history.happenedUpTo(index, MAX_LOG).map(entryOf));
    this.change();
  }

  mark(happened, stays) {
    for (const { pool, block, from } of happened.flatMap(({ marks }) => marks)) {
      this.grids[pool].mark(block, from, stays);
    }
  }

  // Drawing: once for all that changed since the last picture

  change() {
    this.isDirty = true;
    if (this.isVisible && !this.isWaiting) {
      this.isWaiting = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    this.isWaiting = false;
    if (!this.isVisible || this.replica === null) return;
    const { history } = this.replica;
    if (this.isDirty) {
      this.memory = this.held === null ? history.live : this.held.memory;
      this.palette.keep(new Set([...this.memory.sequences.values()].map((each) => each.request_id)));
      this.isDirty = false;
      this.writeTime(history);
      this.listSequences();
      this.describeBlock();
    }
    const { memory } = this;
    find("#no-memory").hidden = memory.shape.numBlocks > 0;
    memory.gpu.isGpu = true;
    let isMoving = false;
    const width = find("#gpu-frame").clientWidth;
    const host = memory.shape.numHostBlocks;
    find("#host").hidden = host === 0;
    for (const [name, grid] of Object.entries(this.grids)) {
      const pool = memory[name];
      if (pool.size === 0) continue;
      const height = name === "gpu" ? Math.max(320, innerHeight - (host ? 420 : 300)) : 110;
      grid.layout(pool.size, width, height);
      grid.pins = memory.pins;
      grid.highlighted = this.blocksOfSelected(name);
      isMoving = grid.draw(memory, pool) || isMoving;
    }
    if (isMoving && !isCalm()) this.change();
    else if (isMoving) setTimeout(() => this.change(), 500);
  }

  blocksOfSelected(name) {
    const sequence = this.selected && this.memory.sequences.get(this.selected);
    if (!sequence) return null;
    return new Set((sequence.status === STATUS.swapped) === (name === "host") ? sequence.table : []);
  }

  writeTime(history) {
    const index = this.shown ?? history.length - 1;
    const slider = find("#moment");
    slider.max = Math.max(0, history.length - 1);
    slider.value = Math.max(0, index);
    find("#pause").textContent = this.shown === null ? "Pause" : "Go on";
    find("#pause").setAttribute("aria-pressed", String(this.shown !== null));
    const age = this.held === null ? 0 : history.frames.at(-1).unix_seconds - this.held.frame.unix_seconds;
    find("#age").textContent = this.shown === null ? "live" : `${age.toFixed(1)} s ago`;
    slider.setAttribute("aria-valuetext", find("#age").textContent);
  }

  // Samples that copy a block on write, and beams that fork: figures 8 and 9 of the paper.
  async runExample() {
    const said = find("#example-said"), messages = [{ role: "user", content: "Tell me a story about a fox." }];
    const run = { model: this.feed.gateway?.model, messages, max_tokens: 200, ignore_eos: true };
    try {
      await Promise.all([
        ask({ ...run, n: 3, temperature: 1 }), ask({ ...run, n: 4, temperature: 0, use_beam_search: true }),
      ]);
    } catch (error) {
      said.textContent = error.message;
    }
  }

  // Sequences

  // Entries stay the same elements while their sequence lives, so that a click meets what it was meant for.
  listSequences() {
    const sequences = [...this.memory.sequences.values()];
    find("#sequence-count").textContent = whole(sequences.length);
    find("#idle").hidden = sequences.length > 0 || this.shown !== null;
    const entries = new Map();
    for (const sequence of sequences.slice(0, MAX_LISTED)) {
      const entry = this.entries.get(sequence.number) ?? this.makeEntry(sequence);
      this.updateEntry(entry, sequence);
      entries.set(sequence.number, entry);
    }
    this.entries = entries;
    const list = find("#sequences"), shown = [...entries.values()].map((each) => each.item);
    if (sequences.length > MAX_LISTED) shown.push(this.more);
    this.more.textContent = `and ${whole(sequences.length - MAX_LISTED)} more`;
    if (shown.length !== list.children.length || shown.some((each, place) => each !== list.children[place])) {
      list.replaceChildren(...shown);
    }
  }

  makeEntry(sequence) {
    const chip = make("span", { className: "chip" }), facts = make("span", { className: "facts" });
    const name = make("span", { className: "name", title: sequence.request_id }, title(sequence, NAME_LENGTH));
    const button = make("button", { type: "button", className: "sequence" }, chip, name, facts);
    button.addEventListener("click", () => this.select(this.selected === sequence.number ? null : sequence.number));
    return { item: make("li", {}, button), button, chip, facts, table: null };
  }

  updateEntry(entry, sequence) {
    const isSelected = sequence.number === this.selected;
    entry.chip.style.background = this.palette.of(sequence);
    entry.facts.textContent = `${whole(sequence.computed)} tokens · ${sequence.table.length} blocks`;
    entry.button.setAttribute("aria-pressed", String(isSelected));
    const table = isSelected ? this.tableOf(sequence) : null;
    if (entry.table !== null) entry.table.remove();
    if (table !== null) entry.item.append(table);
    entry.table = table;
  }

  // The block table, as the paper draws it: logical blocks in order, and the physical block of each.
  tableOf(sequence) {
    const { blockSize } = this.memory.shape;
    const cells = sequence.table.slice(0, MAX_CELLS).map((block, index) => {
      const filled = Math.min(Math.max(sequence.computed - index * blockSize, 0), blockSize);
      const share = filled < blockSize ? ` (${filled}/${blockSize})` : "";
      return make(
        "li", { title: `logical block ${index}: ${filled} of ${blockSize} slots` }, `${index} → ${block}${share}`,
      );
    });
    const facts = `${STATUS_NAMES[sequence.status]}${sequence.is_beam ? " · beam" : ""} · tenant ${sequence.tenant}`;
    return make("div", { className: "table" }, make("p", {}, facts), make("ol", {}, ...cells));
  }

  select(number) {
    this.selected = number;
    this.change();
  }

  selectAtCursor(name) {
    const block = this.grids[name].cursor;
    if (block === null || !this.memory) return;
    const owner = this.memory[name].owners[block] || null;
    this.select(owner === this.selected ? null : owner);
  }

  // One block

  point(name, event) {
    const box = event.target.getBoundingClientRect();
    const block = this.grids[name].blockAt(event.clientX - box.left, event.clientY - box.top);
    if (block !== null) this.pointTo(name, block);
  }

  pointTo(name, block) {
    for (const [each, grid] of Object.entries(this.grids)) grid.cursor = each === name ? block : null;
    if (this.pointed?.name === name && this.pointed.block === block) return;
    this.pointed = { name, block };
    this.forgetBlock();
    this.change();
  }

  forgetBlock() {
    this.readNumber += 1;
    this.tokens = null;
    this.contents = null;
    this.described = null;
  }

  press(name, event) {
    const grid = this.grids[name];
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns };
    if (event.key in moves) {
      const block = (grid.cursor ?? 0) + moves[event.key];
      this.isSpoken = true;
      if (block >= 0 && block < grid.size) this.pointTo(name, block);
    } else if (event.key === "Enter") this.selectAtCursor(name);
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  async read(name, block) {
    const number = (this.readNumber += 1);
    const query = new URLSearchParams({ replica: this.replica.address, block, host: name === "host" ? 1 : 0 });
    try {
      const answer = await fetch(`block?${query}`);
      if (!answer.ok) return;
      const tokens = await answer.json();
      // Another block, another replica or another moment may be shown by now.
      if (number !== this.readNumber || this.shown !== null) return;
      this.tokens = tokens;
      this.described = null;
      this.describeBlock();
    } catch {
      // What the feed told is shown, without the tokens.
    }
  }

  // The tokens are read again when others hold the block, or when it holds more. Of the past they are not known.
  readWhenChanged(contents) {
    if (contents === this.contents) return;
    this.contents = contents;
    if (this.shown !== null) {
      this.tokens = null;
      return;
    }
    this.reading ??= setTimeout(() => {
      this.reading = null;
      if (this.pointed && this.shown === null) this.read(this.pointed.name, this.pointed.block);
    }, READ_DELAY_MS);
  }

  describeBlock() {
    if (!this.pointed || !this.memory) return;
    const { name, block } = this.pointed, { memory } = this, pool = memory[name];
    if (block >= pool.size) return;
    const holders = memory.holdersOf(pool, block);
    const owners = holders.map((each) => each.number);
    this.readWhenChanged(`${this.shown !== null} ${name} ${block} ${owners}:${memory.filled(pool, block)}`);
    const pins = name === "gpu" ? memory.pins.get(block) ?? 0 : 0;
    const facts = [
      ["state", memory.stateOf(pool, block) + (pins ? `, pinned by ${pins}` : "")],
      ["slots", `${memory.filled(pool, block)} of ${memory.shape.blockSize} hold tokens`],
      ["references", whole(pool.refs[block])],
      ["hash", this.tokens?.block_hash ?? (memory.isNamed(pool, block) ? `${memory.names[block]}…` : "not sealed")],
    ];
    // Ten times a second: what stays the same stays, so that it can be selected.
    const described = JSON.stringify([name, block, facts, owners, this.tokens]);
    if (described === this.described) return;
    this.described = described;
    const where = name === "host" ? "Host block" : "Block";
    find("#block-title").textContent = `${where} ${block}`;
    if (this.isSpoken) {
      // What a key pointed at is said once, and not again with each token.
      this.isSpoken = false;
      const names = holders.slice(0, 3).map((each) => title(each));
      find("#block-said").textContent = [`${where} ${block}: ${facts[0][1]}`, facts[1][1], ...names].join(", ");
    }
    find("#block-facts").replaceChildren(
      ...facts.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]),
    );
    find("#block-owners").replaceChildren(...holders.slice(0, 16).map((each) => this.ownerOf(each, block)));
  }

  ownerOf(sequence, block) {
    const place = sequence.table.indexOf(block);
    const found = this.tokens?.owners.find(
      (each) => each.request_id === sequence.request_id && each.sequence_index === sequence.sequence_index,
    );
    const entry = make(
      "li",
      {},
      make("span", { className: "chip", style: { background: this.palette.of(sequence) } }),
      make("span", { className: "name" }, `${title(sequence, NAME_LENGTH)}, logical block ${place}`),
    );
    if (found?.tokens) {
      const tokens = found.tokens.map((text) => make("span", { className: "token" }, text));
      entry.append(make("p", { className: "tokens" }, ...tokens));
    } else if (found) {
      entry.append(make("p", { className: "hint" }, "The text of other tenants is not shown."));
    }
    return entry;
  }
}

