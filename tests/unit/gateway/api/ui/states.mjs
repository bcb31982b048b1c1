// Checks pictures of a model whose layers keep states. Run by test_state.py.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const [folder, path] = process.argv.slice(2);
const { History, Memory, STATUS } = await import(`${folder}/state.js`);
const { gainsOf } = await import(`${folder}/gains.js`);

const history = new History(), kinds = new Set();
let numCheckpoints = 0;
for (const { frame, expected } of JSON.parse(readFileSync(path))) {
  history.add(frame);
  const memory = history.live, { gpu } = memory, checkpoints = memory.checkpoints();
  // Checkpoints of steps in flight have references, and belong to no sequence.
  assert.deepEqual([...gpu.refs], expected.refs);
  for (const sequence of memory.sequences.values()) {
    if (sequence.status === STATUS.running) assert.equal(sequence.state.length, 3);
    for (const block of sequence.table) numCheckpoints += memory.checkpointAt(block, checkpoints).length === 3;
    for (const block of sequence.state) {
      assert.ok(memory.holdersOf(gpu, block).includes(sequence));
      assert.deepEqual([memory.isOfState(gpu, block), memory.filled(gpu, block)], [true, 4]);
      kinds.add(memory.kindOf(gpu.groups[block]));
    }
  }
}
assert.deepEqual([...kinds].sort(), ["state, part 1 of 3", "state, part 2 of 3", "state, part 3 of 3"]);
assert.ok(numCheckpoints);

// 6 tokens in two blocks of 4, with a state in two blocks, and a checkpoint of it after the first.
const memory = new Memory(), none = { gone: [], pins: [], events: [] };
const numbers = { num_blocks: 60, num_host_blocks: 0, block_size: 4, block_bytes: 1000, state_blocks: 2 };
memory.apply({
  is_whole: true, numbers: { ...numbers, full_groups: 1, windowed_groups: 0, blank_block: null },
  memory: {
    ...none, sequences: [{ number: 1, request_id: "r", num_sequences: 1, sequence_index: 0 }],
    progress: [1, STATUS.running, 7, 6], lengths: [1, 2], tables: [1, 0, 8, 1, 1, 9], states: [1, 0, 3, 1, 1, 4],
    named: [8, 5, 6, 7], names: ["aa", "aa", "aa", "bb"],
  },
});
assert.deepEqual(memory.blocksOf(memory.sequences.get(1)), [8, 9, 3, 4]);
assert.deepEqual(memory.checkpointAt(8, memory.checkpoints()), [5, 6]);
assert.deepEqual(memory.checkpointAt(9, memory.checkpoints()), []);
const { held, bytes, filled, orca } = gainsOf(memory, 16);
assert.deepEqual([held, bytes, filled], [4, 4000, 14 / 16]);
// A region for 16 tokens and a state has 6 blocks.
assert.deepEqual([orca.region, orca.regions, orca.bytes, orca.filled], [6, 10, 6000, 14 / 24]);
