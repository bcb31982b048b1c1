// The gains of paging on a load: the memory that Quire holds for it, compared with the memory that Orca (Max), the
// paper's baseline, would reserve. This module does not use the page.

import { STATUS } from "./state.js";

// Blocks of the region that Orca (Max) reserves for each sequence: the model's maximum length, from a buddy allocator,
// as in simulator/baselines/contiguous.py.
export function regionBlocks(maxModelLen, blockSize) {
  return 2 ** Math.ceil(Math.log2(Math.max(1, Math.ceil(maxModelLen / blockSize))));
}

// The sequences in GPU memory, in blocks and slots; null if there are none. `tokens` of Quire counts shared tokens only
// once. A region has slots of all groups of layers, and the blocks of a state, which both hold in full.
export function gainsOf(memory, maxModelLen) {
  const { gpu, shape: { blockSize, blockBytes, numGroups, numStates } } = memory;
  const sequences = [...memory.sequences.values()].filter(
    ({ status, table }) => status !== STATUS.swapped && status !== STATUS.finished && table.length,
  );
  if (!sequences.length || !maxModelLen) return null;
  const requests = new Set(sequences.map((each) => each.request_id)).size;
  const tables = sequences.map((each) => memory.blocksOf(each));
  const named = tables.reduce((sum, table) => sum + table.length, 0), held = new Set(tables.flat());
  let tokens = 0;
  for (const block of held) tokens += memory.filled(gpu, block);
  const region = numGroups * regionBlocks(maxModelLen, blockSize) + numStates, regions = Math.floor(gpu.size / region);
  const ownTokens = sequences.reduce(
    (sum, each) => sum + numGroups * each.computed + each.state.length * blockSize, 0,
  );
  const fits = Math.floor(gpu.size / (held.size / requests));
  const fitsOrca = Math.floor(regions / (sequences.length / requests));
  return {
    sequences, requests, held: held.size, saved: named - held.size, named,
    filled: tokens / (held.size * blockSize), fits, bytes: held.size * blockBytes,
    orca: {
      bytes: sequences.length * region * blockBytes,
      region, regions, reserved: sequences.length * region, fits: fitsOrca,
      filled: ownTokens / (sequences.length * region * blockSize),
    },
    ratio: fitsOrca ? fits / fitsOrca : null,
  };
}
