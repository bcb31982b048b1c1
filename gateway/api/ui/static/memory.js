// The view of memory: every block of the pools as a cell, with its owners and its events.

import { bytes, find, isCalm, make, percent, whole } from "./dom.js";
import { EventLog } from "./events.js";
import { gainsOf } from "./gains.js";
import { Ghost } from "./ghost.js";
import { Grid } from "./grid.js";
import { ask } from "./openai.js";
import { sentenceOf } from "./outage.js";
import { Palette } from "./palette.js";
import { EVENT, STATUS, title } from "./state.js";
import { BlockTable } from "./table.js";
import { Tour } from "./tour.js";
import { Zoom, ZOOM_ABOVE } from "./zoom.js";

const MAX_LOG = 400;
const MAX_LISTED = 64;
const NAME_LENGTH = 14;
const READ_DELAY_MS = 120;
const MIN_HEIGHT = 240;
const HOST_HEIGHT = 110;

export class MemoryView {
  constructor(feed) {
    this.feed = feed;
    this.palette = new Palette();
    this.grids = {
      gpu: new Grid(find("#gpu-blocks"), this.palette), host: new Grid(find("#host-blocks"), this.palette),
    };
    this.ghost = new Ghost(find("#ghost"), this.palette);
    this.zooms = { gpu: new Zoom(), host: new Zoom() };
    this.log = new EventLog(find("#events"), this.palette);
    this.table = new BlockTable(this.palette, {
      heading: find("#table-title"), facts: find("#table-facts"), body: find("#table-rows"),
      read: (name, block) => this.fetchBlock(name, block),
    });
    this.tour = new Tour(this, ask);
    this.gains = null;
    this.replica = null;
    // While the view is paused: the index of the shown frame, the frame, and the memory at that time.
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
    feed.addEventListener("outage", ({ detail: { replica, outage } }) => {
      if (replica !== this.replica || this.shown !== null) return;
      this.log.add([{ text: sentenceOf(outage, replica.now), isBad: outage.to === null }]);
      this.change();
    });
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
    find("#moment").addEventListener("input", (event) => {
      this.endTour();
      this.goTo(Number(event.target.value));
    });
    find("#zoom").addEventListener("click", () => {
      for (const zoom of Object.values(this.zooms)) zoom.isWhole = !zoom.isWhole;
      this.change();
    });
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
    this.gains = null;
    this.endTour();
    this.table.sequence = null;
    // Texts and events belong to the previous replica.
    this.forgetBlock();
    this.pointed = null;
    for (const grid of Object.values(this.grids)) grid.cursor = null;
    find("#block-title").textContent = "Point at a block";
    for (const place of ["#block-facts", "#block-owners"]) find(place).replaceChildren();
    this.tell(replica.history, replica.history.length - 1, []);
  }

  take(replica) {
    // A frame with a part of a large picture cannot be shown by itself.
    if (replica !== this.replica || replica.frame === null || replica.frame !== replica.history.frames.at(-1)) return;
    if (this.shown !== null) {
      // Dropped frames change the index of the shown one. If the shown frame is dropped, its picture stays.
      this.shown = Math.max(0, replica.history.frames.indexOf(this.held.frame));
    } else {
      this.mark(replica.frame.happened, false);
      this.log.add(replica.frame.happened);
    }
    this.change();
  }

  // Time

  pause(isPaused) {
    const { history } = this.replica ?? {};
    if (!history?.length) return;
    this.endTour();
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
    this.endTour();
    this.goTo(this.shown + frames);
  }

  // Shows a frame, and marks its events, or only some of them.
  goTo(index, events = null) {
    const { history } = this.replica ?? {};
    if (!history?.length) return;
    this.shown = Math.max(0, Math.min(history.length - 1, index));
    this.held = { frame: history.frames[this.shown], memory: history.at(this.shown) };
    this.tell(history, this.shown, events ?? this.held.frame.happened);
  }

  narrate(text) {
    find("#told").textContent = text;
  }

  endTour() {
    this.tour.stop();
    this.narrate("");
  }

  // Shows the events up to a frame; the blocks of `happened` stay marked.
  tell(history, index, happened) {
    for (const grid of Object.values(this.grids)) grid.marks = [];
    this.mark(happened, true);
    this.log.clear();
    this.log.add(history.happenedUpTo(index, MAX_LOG).reverse());
    this.change();
  }

  mark(happened, stays) {
    for (const { pool, block, from } of happened.flatMap(({ marks }) => marks)) {
      this.grids[pool].mark(block, from, stays);
    }
  }

  // Drawing: once for all changes since the last picture

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
      this.showTable();
      this.describeBlock();
      this.gains = gainsOf(this.memory, this.maxModelLen) ?? this.gains;
      this.writeGains();
    }
    const { memory } = this, { shape } = memory;
    find("#no-memory").hidden = shape.numBlocks > 0;
    memory.gpu.isGpu = true;
    let isMoving = false;
    // Empty host memory is not shown.
    const isSwapped = memory.host.refs.some(Boolean);
    find("#host").hidden = !isSwapped;
    const height = Math.max(MIN_HEIGHT, innerHeight - (isSwapped ? 520 : 380));
    for (const [name, grid] of Object.entries(this.grids)) {
      const pool = memory[name];
      if (pool.size === 0 || (name === "host" && !isSwapped)) continue;
      const width = find(name === "gpu" ? "#gpu-frame" : "#host").clientWidth;
      grid.layout(pool.size, this.zooms[name].of(pool), width, name === "gpu" ? height : HOST_HEIGHT);
      grid.pins = memory.pins;
      grid.highlighted = this.blocksOfSelected(name);
      isMoving = grid.draw(memory, pool) || isMoving;
    }
    find("#orca").hidden = this.gains === null;
    if (this.gains !== null) {
      const tokens = shape.blockSize / shape.numGroups;
      this.ghost.draw(this.gains, tokens, find("#orca-frame").clientWidth, this.grids.gpu.drawnHeight);
    }
    this.writePool();
    if (isMoving && !isCalm()) this.change();
    else if (isMoving) setTimeout(() => this.change(), 500);
  }

  blocksOfSelected(name) {
    const sequence = this.selected && this.memory.sequences.get(this.selected);
    if (!sequence) return null;
    return new Set((sequence.status === STATUS.swapped) === (name === "host") ? this.memory.blocksOf(sequence) : []);
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
    this.markTime(history);
  }

  // Marks on the slider: preemptions, and times without a service.
  markTime({ frames }) {
    const last = Math.max(1, frames.length - 1), marks = [];
    const add = (from, to, className, title) => marks.push({ from: from / last, to: to / last, className, title });
    frames.forEach((frame, index) => {
      if (frame.happened.some(({ kind }) => kind === EVENT.preempt)) add(index, index, "", "preemption");
    });
    for (const { service, from, to } of this.replica.outages.all) {
      const isIn = ({ unix_seconds: at }) => at >= from - 0.2 && at <= (to ?? Infinity) + 0.2;
      const first = frames.findIndex(isIn);
      if (first >= 0) add(Math.max(0, first - 1), frames.findLastIndex(isIn), "bad", `the ${service} was down`);
    }
    const drawn = JSON.stringify(marks);
    if (drawn === this.marked) return;
    this.marked = drawn;
    find("#marks").replaceChildren(...marks.map(({ from, to, className, title }) => make("span", {
      className, title, style: { left: `${100 * from}%`, width: `${100 * (to - from)}%` },
    })));
  }

  // Samples that copy a block on write, and beams that fork: figures 8 and 9 of the paper.
  async runExample() {
    try {
      await this.tour.run(this.feed.gateway?.model);
    } catch (error) {
      find("#example-said").textContent = error.message;
    }
  }

  // The gains of paging

  get maxModelLen() {
    return this.feed.gateway?.replicas.find((each) => each.address === this.replica.address)?.max_model_len ?? 0;
  }

  writeGains() {
    const { gains } = this, unknown = "–";
    find("#gains-of").textContent = this.isIdle && gains !== null ? "of the last load" : "on this load";
    const facts = gains === null ? [[unknown, "", 0, 0], ...Array(3).fill([unknown, ""])] : [
      [percent(gains.filled), `Orca (Max): ${percent(gains.orca.filled)}`, gains.filled, gains.orca.filled],
      [whole(gains.saved), `${whole(gains.held)} blocks instead of ${whole(gains.named)}`],
      [gains.ratio === null ? "any" : `${gains.ratio.toFixed(1)}×`,
        `${whole(gains.fits)} like these fit at their size now; Orca (Max): ${whole(gains.orca.fits)}`],
      [bytes(gains.bytes), `Orca (Max), all layers: ${bytes(gains.orca.bytes)}`],
    ];
    const meters = document.querySelectorAll("#gains .meter");
    facts.forEach(([value, more, ...shares], place) => {
      const tile = find("#gains").children[place];
      tile.querySelector("b").textContent = value;
      tile.querySelector("small").textContent = more;
      shares.forEach((share, index) => { meters[index].style.width = `${100 * share}%`; });
    });
    if (gains === null) return;
    const { orca, sequences } = gains, waiting = Math.max(0, sequences.length - orca.regions);
    find("#orca-facts").textContent = `${whole(Math.min(sequences.length, orca.regions))} × ` +
      `${whole(orca.region)} blocks` + (waiting ? `; ${whole(waiting)} sequences wait` : "");
  }

  writePool() {
    const { gpu } = this.memory, zoom = this.zooms.gpu;
    const used = gpu.refs.reduce((sum, count) => sum + (count > 0), 0);
    const isLarge = gpu.size > ZOOM_ABOVE;
    find("#pool-facts").textContent = `${whole(used)} of ${whole(gpu.size)} blocks in use` +
      (isLarge && !zoom.isWhole ? `; ${whole(this.grids.gpu.count)} are shown` : "");
    find("#zoom").hidden = !isLarge;
    find("#zoom").textContent = zoom.isWhole ? "Blocks in use" : "Whole pool";
  }

  // Sequences

  // An entry stays the same element while its sequence lives, so that a click hits the intended entry.
  listSequences() {
    const sequences = [...this.memory.sequences.values()];
    find("#sequence-count").textContent = whole(sequences.length);
    this.isIdle = sequences.length === 0;
    // Requests that wait for a lost service hold no blocks.
    const isFree = this.isIdle && this.replica.outages.current === null;
    find("#idle").hidden = !isFree || this.shown !== null || find("#told").textContent !== "";
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
    const name = make("span", { className: "name", title: sequence.request_id }, sequence.request_id);
    const many = sequence.num_sequences > 1 ? `#${sequence.sequence_index}` : "";
    const index = make("span", { className: "index" }, many);
    const button = make("button", { type: "button", className: "sequence" }, chip, name, index, facts);
    button.addEventListener("click", () => this.select(this.selected === sequence.number ? null : sequence.number));
    return { item: make("li", {}, button), button, chip, facts };
  }

  updateEntry(entry, sequence) {
    entry.chip.style.background = this.palette.of(sequence);
    entry.facts.textContent = `${whole(sequence.computed)} tokens · ${this.memory.blocksOf(sequence).length} blocks`;
    entry.button.setAttribute("aria-pressed", String(sequence.number === this.selected));
  }

  // Shows the block table of the selected sequence, else of the shown one, or of the first one.
  showTable() {
    const { sequences } = this.memory, { table } = this;
    const before = table.sequence && sequences.get(table.sequence.number);
    const kept = before?.request_id === table.sequence?.request_id ? before : undefined;
    const sequence = sequences.get(this.selected) ?? kept ?? [...sequences.values()].find((each) => each.table.length);
    find("#table").hidden = sequence === undefined && table.sequence === null;
    if (sequence?.table.length) table.show(sequence, this.memory, this.shown === null);
    else table.end();
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
    const tokens = await this.fetchBlock(name, block);
    // Meanwhile the user may have chosen another block, replica or time.
    if (tokens === null || number !== this.readNumber || this.shown !== null) return;
    this.tokens = tokens;
    this.described = null;
    this.describeBlock();
  }

  // A block with the tokens of its owners; null if it cannot be read, and then the data of the feed is shown.
  async fetchBlock(name, block) {
    const query = new URLSearchParams({ replica: this.replica.address, block, host: name === "host" ? 1 : 0 });
    try {
      const answer = await fetch(`block?${query}`);
      return answer.ok ? await answer.json() : null;
    } catch {
      return null;
    }
  }

  // The tokens are read again if the owners of the block change, or it has more tokens. They are unknown for the past.
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
      memory.isOfState(pool, block) ? ["slots", "none: it holds a part of a state"]
        : ["slots", `${memory.filled(pool, block)} of ${memory.shape.blockSize} hold tokens`],
      ["references", whole(pool.refs[block])],
      ...(pool.owners[block] && memory.kindOf(pool.groups[block])
        ? [["layers", memory.kindOf(pool.groups[block])]] : []),
      ["hash", this.tokens?.block_hash ?? (memory.isNamed(pool, block) ? `${memory.names[block]}…` : "not sealed")],
    ];
    // Called ten times a second: unchanged elements stay, so that they can be selected.
    const described = JSON.stringify([name, block, facts, owners, this.tokens]);
    if (described === this.described) return;
    this.described = described;
    const where = name === "host" ? "Host block" : "Block";
    find("#block-title").textContent = `${where} ${block}`;
    if (this.isSpoken) {
      // The block at the cursor is announced once, and not again with each token.
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
    const part = sequence.state.indexOf(block);
    const place = Math.floor(sequence.table.indexOf(block) / this.memory.shape.numGroups);
    const what = part < 0 ? `logical block ${place}` : `part ${part + 1} of its state`;
    const found = this.tokens?.owners.find(
      (each) => each.request_id === sequence.request_id && each.sequence_index === sequence.sequence_index,
    );
    const entry = make(
      "li",
      {},
      make("span", { className: "chip", style: { background: this.palette.of(sequence) } }),
      make("span", { className: "name" }, `${title(sequence, NAME_LENGTH)}, ${what}`),
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

