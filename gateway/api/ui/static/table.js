// The block table of one sequence with its text, as figure 6 of the paper draws it: logical blocks in order, the text
// in their slots, and the physical block of each, in each group of layers.

import { make, whole } from "./dom.js";
import { STATUS } from "./state.js";

const [FIRST_ROWS, LAST_ROWS] = [4, 12];
const READ_DELAY_MS = 250;
const READ_AT_ONCE = 8;
const KEPT_SEQUENCES = 32;
const MOST_BLOCKS = 8;
const STATUS_NAMES = { 1: "waits to fork", 2: "runs", 3: "swapped out", 4: "over" };

// The first blocks of a list, as text.
const shortened = (blocks) => blocks.slice(0, MOST_BLOCKS).join(", ") + (blocks.length > MOST_BLOCKS ? ", …" : "");

export class BlockTable {
  // `read(name, block)` resolves to a block with the tokens of its owners, or to null.
  constructor(palette, { heading, facts, body, read }) {
    Object.assign(this, { palette, heading, facts, body, read });
    this.sequence = null;
    // Texts of the last shown sequences, with which their past can be shown.
    this.known = new Map();
    this.texts = new Map();
  }

  recall({ request_id: request, number }) {
    const id = `${request} ${number}`;
    this.texts = this.known.get(id) ?? new Map();
    this.known.delete(id);
    this.known.set(id, this.texts);
    if (this.known.size > KEPT_SEQUENCES) this.known.delete(this.known.keys().next().value);
    this.written = null;
    this.isPrivate = false;
  }

  // Shows the present state of a sequence; `canRead` is false for the past, of which only known texts are shown.
  show(sequence, memory, canRead) {
    if (sequence.number !== this.sequence?.number || sequence.request_id !== this.sequence.request_id) {
      this.recall(sequence);
    }
    this.sequence = sequence;
    this.memory = memory;
    this.blockSize = memory.shape.blockSize;
    this.pool = memory.poolOf(sequence);
    this.isOver = false;
    this.write();
    if (canRead && !this.isPrivate) this.readChanged();
  }

  // The sequence holds no more blocks; its last table stays.
  end() {
    if (this.sequence === null || this.isOver) return;
    this.isOver = true;
    this.write();
  }

  get length() {
    return Math.ceil(this.sequence.table.length / this.pool.numGroups);
  }

  // The entries of a logical block, by group of layers.
  entriesOf(place) {
    const { numGroups } = this.pool;
    return this.sequence.table.slice(place * numGroups, (place + 1) * numGroups);
  }

  // The block from which the text of a logical block is read; undefined if no layer reads it.
  blockOf(place) {
    return this.entriesOf(place).find((block) => block !== this.pool.blank);
  }

  // The logical blocks that have a row.
  get places() {
    const { length } = this;
    const all = Array.from({ length }, (_, place) => place);
    return length <= FIRST_ROWS + LAST_ROWS ? all : [...all.slice(0, FIRST_ROWS), ...all.slice(-LAST_ROWS)];
  }

  filled(place) {
    return Math.min(Math.max(this.sequence.computed - place * this.blockSize, 0), this.blockSize);
  }

  // The key of a text that was read: a full block that stays in its place is read once.
  keyOf(place) {
    return `${this.blockOf(place)}:${this.filled(place)}`;
  }

  // The tokens that were read from the present block of a place; null if none were read.
  tokensAt(place) {
    const text = this.texts.get(place);
    return text !== undefined && text.block === this.blockOf(place) ? text.tokens.slice(0, this.filled(place)) : null;
  }

  write() {
    const { sequence } = this;
    const { places } = this, refs = places.map((place) => this.entriesOf(place).map((each) => this.pool.refs[each]));
    const texts = places.map((place) => this.tokensAt(place));
    const checkpoints = this.memory.checkpoints();
    const saved = places.map((place) => this.memory.checkpointAt(this.blockOf(place), checkpoints));
    const written = JSON.stringify([sequence.number, sequence.status, sequence.computed, sequence.table, refs, texts,
      sequence.state, saved, this.isOver, this.isPrivate]);
    if (written === this.written) return;
    this.written = written;
    const many = sequence.num_sequences > 1 ? ` #${sequence.sequence_index}` : "";
    this.heading.replaceChildren(
      make("span", { className: "chip", style: { background: this.palette.of(sequence) } }),
      make("span", { className: "name", title: sequence.request_id }, sequence.request_id),
      make("span", { className: "index" }, many),
    );
    const status = this.isOver ? "over; its blocks are given back" : STATUS_NAMES[sequence.status];
    const kind = sequence.is_beam ? " · beam" : "", tenant = sequence.tenant ? ` · tenant ${sequence.tenant}` : "";
    this.facts.textContent = `${status}${kind}${tenant} · ${whole(sequence.computed)} tokens in ` +
      `${whole(this.memory.blocksOf(sequence).length - sequence.state.length)} blocks of ${this.blockSize}` +
      (sequence.state.length ? ` · state in ${sequence.state.length} blocks: ${shortened(sequence.state)}` : "");
    const rows = places.map((place, index) => this.rowOf(place, saved[index]));
    const left = this.length - places.length;
    if (left) {
      const cell = make("td", { colSpan: 4, className: "hint" }, `${whole(left)} logical blocks between`);
      rows.splice(FIRST_ROWS, 0, make("tr", {}, cell));
    }
    this.body.replaceChildren(...rows);
  }

  // A row with the blocks of the checkpoint behind it.
  rowOf(place, saved) {
    const filled = this.filled(place);
    const tokens = this.tokensAt(place), hint = (text) => make("span", { className: "hint" }, text);
    const text = tokens === null ? [hint(this.isPrivate ? "text of another tenant" : "…")]
      : [...tokens.map((each) => make("span", { className: "token" }, each)),
        ...(tokens.length < filled ? [hint("…")] : []),
        ...Array.from({ length: this.blockSize - filled }, () => make("span", { className: "slot" }))];
    const physical = this.entriesOf(place).flatMap((block, group) => {
      const gap = group ? " " : "";
      if (block === this.pool.blank) return [gap, make("span", { title: this.memory.kindOf(group) }, "–")];
      const count = this.pool.refs[block], isShared = !this.isOver && count > 1;
      const shared = isShared ? make("span", { className: "refs", title: "references" }, count) : "";
      return [gap, make("b", { title: this.memory.kindOf(group) }, block), shared];
    });
    if (saved.length) {
      const where = `a checkpoint of the state after this block, in ${saved.length} blocks: ${shortened(saved)}`;
      physical.push(" ", make("span", { className: "hint", title: where }, "⚑"));
    }
    return make(
      "tr", {}, make("th", { scope: "row" }, place), make("td", { className: "text" }, ...text),
      make("td", { className: "physical" }, "→ ", ...physical),
      make("td", { className: "filled" }, `${filled}/${this.blockSize}`),
    );
  }

  readChanged() {
    this.reading ??= setTimeout(async () => {
      const { sequence } = this;
      const name = sequence.status === STATUS.swapped ? "host" : "gpu";
      const stale = this.isOver ? [] : this.places.filter((place) => this.texts.get(place)?.key !== this.keyOf(place));
      await Promise.all(stale.slice(-READ_AT_ONCE).map((place) => this.readOne(sequence, name, place)));
      this.reading = null;
      if (this.sequence.number === sequence.number) this.write();
    }, READ_DELAY_MS);
  }

  async readOne(sequence, name, place) {
    const block = this.blockOf(place), key = this.keyOf(place), { texts } = this;
    if (block === undefined) return;
    const answer = await this.read(name, block);
    const owner = answer?.owners.find((each) => each.request_id === sequence.request_id &&
      each.sequence_index === sequence.sequence_index && each.logical_index === place);
    if (owner === undefined) return;
    if (owner.tokens === null) this.isPrivate ||= this.texts === texts;
    else texts.set(place, { key, block, tokens: owner.tokens });
  }
}
