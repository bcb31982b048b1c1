// The state of a scheduler's memory, from the frames of its feed, and the frames of the last minute for replays. This
// module does not use the page, so that it also runs outside of browsers.

export const STATUS = { waiting: 1, running: 2, swapped: 3, finished: 4 };
export const EVENT = { copy: 1, swapOut: 2, swapIn: 3, fork: 4, preempt: 5 };

const KEPT_SECONDS = 60;
const KEYFRAME_SECONDS = 5;
const NAME_LENGTH = 14;

// The rows of a flat array.
export function* rows(flat, width) {
  for (let start = 0; start + width <= flat.length; start += width) yield flat.slice(start, start + width);
}

// Sequences with their block tables, the names of blocks, and pins. A table has an entry for each group of layers and
// logical block, and the entry `blank` for blocks that no layer reads; `state` are the blocks of the sequence's state,
// if layers keep states. `refs`, `owners`, `places` and `groups` are derived: number of tables, states and pins that
// hold a block, the first sequence that holds it (0: none), the block's logical index there, and its group. The blocks
// of a state are further groups.
export class Memory {
  constructor() {
    this.shape = {
      numBlocks: 0, numHostBlocks: 0, blockSize: 16, blockBytes: 0, numFull: 1, numGroups: 1, window: 0, numStates: 0,
    };
    this.sequences = new Map();
    this.names = [];
    this.pins = new Map();
    this.derive();
  }

  apply(frame) {
    const { numbers, memory } = frame;
    if (memory === null) return;
    if (frame.is_whole) {
      this.sequences = new Map();
      this.pins = new Map();
      this.names = new Array(numbers.num_blocks).fill("");
      this.shape = {
        numBlocks: numbers.num_blocks, numHostBlocks: numbers.num_host_blocks, blockSize: numbers.block_size,
        blockBytes: numbers.block_bytes ?? 0, window: numbers.window ?? 0, numFull: numbers.full_groups ?? 1,
        numGroups: Math.max(1, (numbers.full_groups ?? 1) + (numbers.windowed_groups ?? 0)),
        numStates: numbers.state_blocks ?? 0, blank: numbers.blank_block ?? null,
        blankOnHost: numbers.blank_host_block ?? null,
      };
    }
    for (const number of memory.gone) this.sequences.delete(number);
    for (const each of memory.sequences) {
      const fresh = { status: STATUS.waiting, tokens: 0, computed: 0, table: [], state: [] };
      this.sequences.set(each.number, { ...each, ...fresh });
    }
    for (const [number, status, tokens, computed] of rows(memory.progress, 4)) {
      // A new object, since copies of this memory share unchanged objects.
      this.sequences.set(number, { ...this.sequences.get(number), status, tokens, computed });
    }
    const changed = new Set();
    const tableOf = (number) => {
      if (!changed.has(number)) {
        changed.add(number);
        const sequence = this.sequences.get(number);
        this.sequences.set(number, { ...sequence, table: sequence.table.slice() });
      }
      return this.sequences.get(number).table;
    };
    for (const [number, length] of rows(memory.lengths, 2)) tableOf(number).length = length;
    for (const [number, index, block] of rows(memory.tables, 3)) tableOf(number)[index] = block;
    for (const [number, index, block] of rows(memory.states ?? [], 3)) {
      const sequence = this.sequences.get(number), state = sequence.state.slice();
      state[index] = block;
      this.sequences.set(number, { ...sequence, state });
    }
    if (memory.named.length && !frame.is_whole) this.names = this.names.slice();
    memory.named.forEach((block, place) => { this.names[block] = memory.names[place]; });
    if (memory.pins.length) this.pins = new Map(this.pins);
    for (const [block, count] of rows(memory.pins, 2)) {
      if (count) this.pins.set(block, count); else this.pins.delete(block);
    }
    this.derive();
  }

  derive() {
    const { numBlocks, numHostBlocks, numGroups, blank, blankOnHost } = this.shape;
    this.gpu = new Pool(numBlocks, numGroups, blank);
    this.host = new Pool(numHostBlocks, numGroups, blankOnHost);
    for (const sequence of this.sequences.values()) this.poolOf(sequence).hold(sequence);
    for (const [block, count] of this.pins) this.gpu.refs[block] += count;
  }

  poolOf(sequence) {
    return sequence.status === STATUS.swapped ? this.host : this.gpu;
  }

  // The blocks that a sequence holds.
  blocksOf(sequence) {
    const { blank } = this.poolOf(sequence);
    const inTable = blank === null ? sequence.table : sequence.table.filter((block) => block !== blank);
    return sequence.state.length ? [...inTable, ...sequence.state] : inTable;
  }

  // What the layers of a group read, in words; empty if the model has one group.
  kindOf(group) {
    const { numGroups, numFull, numStates, window } = this.shape;
    if (group >= numGroups) return `state, part ${group - numGroups + 1} of ${numStates}`;
    if (numGroups === 1) return "";
    return `group ${group}: ${group < numFull ? "all tokens" : `the last ${window} tokens`}`;
  }

  isOfState(pool, block) {
    return pool.owners[block] !== 0 && pool.groups[block] >= this.shape.numGroups;
  }

  // The blocks of checkpoints by the name of the last block of their tokens, which begins as their own names do: named
  // blocks that no sequence holds, and whose names one more block has.
  checkpoints() {
    const found = new Map();
    if (!this.shape.numStates) return found;
    this.names.forEach((name, block) => {
      if (name && !this.gpu.owners[block]) found.set(name, [...(found.get(name) ?? []), block]);
    });
    return found;
  }

  // The blocks of the checkpoint behind a block of tokens that a sequence holds.
  checkpointAt(block, checkpoints) {
    return (this.names[block] && checkpoints.get(this.names[block])) || [];
  }

  copy() {
    const other = new Memory();
    other.shape = this.shape;
    other.sequences = new Map(this.sequences);
    other.names = this.names;
    other.pins = this.pins;
    other.derive();
    return other;
  }

  // The number of a block's slots that hold tokens.
  filled(pool, block) {
    const owner = this.sequences.get(pool.owners[block]);
    const size = this.shape.blockSize;
    if (owner === undefined) return this.isNamed(pool, block) ? size : 0;
    if (this.isOfState(pool, block)) return size;
    return Math.min(Math.max(owner.computed - pool.places[block] * size, 0), size);
  }

  isNamed(pool, block) {
    return pool === this.gpu && Boolean(this.names[block]);
  }

  // The state of a block, in one word.
  stateOf(pool, block) {
    if (block === pool.blank) return "stands for blocks that no layer reads";
    if (pool.owners[block]) {
      const owner = this.sequences.get(pool.owners[block]);
      if (owner.status === STATUS.swapped) return "swapped";
      if (owner.status === STATUS.finished) return "freed soon";
      return pool.refs[block] > 1 ? "shared" : "used";
    }
    if (pool.refs[block]) return "pinned";
    return this.isNamed(pool, block) ? "cached" : "free";
  }

  holdersOf(pool, block) {
    const isHost = pool === this.host;
    return [...this.sequences.values()].filter(
      (each) => block !== pool.blank && (each.status === STATUS.swapped) === isHost &&
        (each.table.includes(block) || each.state.includes(block)),
    );
  }
}

class Pool {
  constructor(size, numGroups, blank) {
    Object.assign(this, { size, numGroups, blank: blank ?? null });
    this.refs = new Uint16Array(size);
    this.owners = new Uint32Array(size);
    this.places = new Uint32Array(size);
    this.groups = new Uint32Array(size);
  }

  hold(sequence) {
    const { table, state, number } = sequence;
    for (let place = 0; place < table.length; place += 1) {
      const block = table[place];
      if (block === this.blank) continue;
      this.refs[block] += 1;
      if (this.owners[block] === 0) {
        this.owners[block] = number;
        this.places[block] = Math.floor(place / this.numGroups);
        this.groups[block] = place % this.numGroups;
      }
    }
    state.forEach((block, part) => {
      this.refs[block] += 1;
      if (this.owners[block] !== 0) return;
      this.owners[block] = number;
      this.groups[block] = this.numGroups + part;
    });
  }
}

// The frames of the last minute. `live` is the memory as of the newest one.
export class History {
  constructor() {
    this.live = new Memory();
    this.frames = [];
    this.keyframes = [];
    this.hasParts = false;
    this.happened = [];
  }

  // Adds the events of blocks to the frame, as sentences, since their requests may be missing in the next frame.
  add(frame) {
    const before = frame.memory?.events.length ? new Map(this.live.sequences) : new Map();
    this.live.apply(frame);
    if (frame.memory === null) return;
    this.happened.push(...describe(this.live, frame, before));
    // The last part of a large pool's picture represents all parts.
    const isWhole = frame.is_whole || this.hasParts;
    this.hasParts = Boolean(frame.more_follows);
    if (this.hasParts) return;
    frame.happened = this.happened;
    this.happened = [];
    this.frames.push(frame);
    const last = this.keyframes.at(-1);
    if (isWhole || last === undefined || frame.unix_seconds - last.frame.unix_seconds >= KEYFRAME_SECONDS) {
      this.keyframes.push({ frame, memory: this.live.copy() });
    }
    this.forget(frame.unix_seconds - KEPT_SECONDS);
  }

  // Drops frames before a time, unless later ones need them: the first frame must be a keyframe.
  forget(before) {
    while (this.keyframes.length > 1 && this.keyframes[1].frame.unix_seconds <= before) this.keyframes.shift();
    const first = this.frames.indexOf(this.keyframes[0]?.frame);
    if (first > 0) this.frames.splice(0, first);
  }

  get length() {
    return this.frames.length;
  }

  // The last `count` events up to a frame, newest first.
  happenedUpTo(index, count) {
    const found = [];
    for (let place = index; place >= 0 && found.length < count; place -= 1) {
      found.push(...this.frames[place].happened.toReversed());
    }
    return found.slice(0, count);
  }

  // The memory at one of the frames; it does not change.
  at(index) {
    if (index === this.frames.length - 1) return this.live.copy();
    const isBefore = (each) => this.frames.indexOf(each.frame) <= index;
    const start = this.keyframes.findLast(isBefore);
    const memory = start.memory.copy();
    for (let place = this.frames.indexOf(start.frame) + 1; place <= index; place += 1) memory.apply(this.frames[place]);
    return memory;
  }
}

// The events of blocks in a frame: sentences, with their request ("" if it is no longer known), and the blocks to mark,
// as {pool, block, from}. `before` has the sequences before the frame.
function describe(memory, frame, before) {
  const find = (number) => memory.sequences.get(number) ?? before.get(number);
  const name = (number) => {
    const sequence = find(number);
    return sequence === undefined ? `sequence ${number}` : title(sequence, NAME_LENGTH);
  };
  const number = (key) => {
    const sequence = find(key);
    return sequence === undefined || sequence.num_sequences < 2 ? name(key) : `#${sequence.sequence_index}`;
  };
  // The present or the previous owner of a block.
  const holder = (pool, block) => find(memory[pool].owners[block]) ?? [...before.values()].find(
    (each) => (each.status === STATUS.swapped) === (pool === "host") &&
      (each.table.includes(block) || each.state.includes(block)),
  );
  const gpu = (block, from = null) => ({ pool: "gpu", block, from });
  const host = (block) => ({ pool: "host", block, from: null });
  const say = {
    [EVENT.copy]: (a, b) => [
      `copy-on-write: block ${a} is copied to ${b}`, [gpu(b, a)], holder("gpu", b) ?? holder("gpu", a),
    ],
    [EVENT.swapOut]: (a, b) => [
      `swap out: block ${a} to host block ${b}`, [gpu(a), host(b)], holder("host", b) ?? holder("gpu", a),
    ],
    [EVENT.swapIn]: (a, b) => [
      `swap in: host block ${a} to block ${b}`, [host(a), gpu(b)], holder("gpu", b) ?? holder("host", a),
    ],
    [EVENT.fork]: (a, b) => [`fork: ${number(b)} shares the blocks of ${number(a)}`, [], find(b) ?? find(a)],
    // The moves of a swapped sequence contain the present places of its blocks.
    [EVENT.preempt]: (a, b) => (b
      ? [`preempted: ${name(a)} was swapped out`, [], find(a)]
      : [
        `preempted: ${name(a)} will be computed again`,
        before.has(a) ? memory.blocksOf(before.get(a)).map((block) => gpu(block)) : [], find(a),
      ]),
  };
  return [...rows(frame.memory.events, 4)].filter(([kind]) => kind in say).map(([kind, step, first, second]) => {
    const [text, marks, sequence] = say[kind](first, second);
    return { kind, step, text, marks, request: sequence?.request_id ?? "" };
  });
}

// The name of a sequence: its request, shortened to `most` characters, and its number if there are several.
export function title(sequence, most = Infinity) {
  const { request_id: id, num_sequences: count, sequence_index: index } = sequence;
  const shown = id.length > most ? `${id.slice(0, most)}…` : id;
  return count > 1 ? `${shown} #${index}` : shown;
}
