// Checks pictures of a model with groups of layers: one that reads all tokens and two with a window. Run by
// test_state.py.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const [folder, path] = process.argv.slice(2);
const { History, Memory, STATUS } = await import(`${folder}/state.js`);
const { gainsOf } = await import(`${folder}/gains.js`);

const history = new History(), seen = new Set();
for (const { frame, expected } of JSON.parse(readFileSync(path))) {
  history.add(frame);
  const memory = history.live, { gpu, host } = memory;
  assert.deepEqual([...gpu.refs], expected.refs);
  assert.deepEqual([...host.refs], expected.host_refs);
  for (const sequence of memory.sequences.values()) {
    const blocks = memory.blocksOf(sequence);
    assert.ok(!blocks.includes(memory.poolOf(sequence).blank));
    if (blocks.length < sequence.table.length) seen.add(sequence.status);
  }
  for (let block = 0; block < gpu.size; block += 1) {
    assert.equal(memory.holdersOf(gpu, block).length > 0, gpu.owners[block] !== 0);
    if (gpu.owners[block]) seen.add(memory.kindOf(gpu.groups[block]));
  }
  assert.match(memory.stateOf(gpu, gpu.blank), /no layer reads/);
}
const kinds = ["group 0: all tokens", "group 1: the last 6 tokens", "group 2: the last 6 tokens"];
for (const each of [STATUS.running, ...kinds]) assert.ok(seen.has(each), `no ${each}`);

// 12 tokens in blocks of 4: three blocks of the full group and two of each windowed one; the entry 9 is blank.
const memory = new Memory(), none = { gone: [], named: [], names: [], pins: [], events: [] };
const numbers = { num_blocks: 60, num_host_blocks: 0, block_size: 4, block_bytes: 1000 };
const groups = { full_groups: 1, windowed_groups: 2, window: 6, blank_block: 9, blank_host_block: null };
const table = [[0, 9, 9], [1, 3, 4], [2, 5, 6]].flat();
memory.apply({
  is_whole: true, numbers: { ...numbers, ...groups },
  memory: {
    ...none, sequences: [{ number: 1, request_id: "r", num_sequences: 1, sequence_index: 0 }],
    progress: [1, STATUS.running, 11, 11], lengths: [1, 9], tables: table.flatMap((block, at) => [1, at, block]),
  },
});
assert.deepEqual(memory.blocksOf(memory.sequences.get(1)), [0, 1, 3, 4, 2, 5, 6]);
assert.deepEqual([memory.filled(memory.gpu, 4), memory.filled(memory.gpu, 6), memory.gpu.groups[6]], [4, 3, 2]);
const { held, bytes, filled, orca } = gainsOf(memory, 16);
// A region for 16 tokens of all groups has 12 blocks.
assert.deepEqual([held, bytes, filled], [7, 7000, 25 / 28]);
assert.deepEqual([orca.region, orca.regions, orca.bytes, orca.filled], [12, 5, 12000, 33 / 48]);
