// Weights in the order in which product.cpp reads them.
//
// A panel is kPanel columns of the product. It is a row of blocks: two tiles of 16 columns, each 16 lines of words, which
// are what a word of a token is multiplied with: a float, two shorter numbers, or four codes where tokens are codes. Where
// numbers are stored as codes, a word here has 1 or 2 bytes instead of 4. So a line of a tile is what a vector multiplies
// by one word of a token, a tile is what a matrix unit loads, and a thread reads its panels from end to end without a jump.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>

#include "api.h"
#include "huge_pages.h"
#include "isa.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int64_t kTile = kPanel / 2;

// The row of the weight that column `column` of a panel holds; none where it is filled up.
std::optional<int64_t> row_of(const PackArgs& args, int64_t panel, int64_t column) {
  if (!args.gated) {
    const int64_t row = panel * kPanel + column;
    return row < args.out_features ? std::optional(row) : std::nullopt;
  }
  const int64_t half = args.out_features / 2, row = panel * kTile + column % kTile;
  if (row >= half) return std::nullopt;
  return column < kTile ? row : half + row;
}

// One block of a panel: lines of the weight from byte `begin` of its rows on, `count` bytes of which there are.
template <class Word>
void pack_block(const PackArgs& args, Word* block, int64_t panel, int64_t begin, int64_t count) {
  constexpr int64_t kBytes = kWordsOfBlock * sizeof(Word);
  const std::byte* weight = static_cast<const std::byte*>(args.weight);
  for (int64_t column = 0; column < kPanel; ++column) {
    Word words[kWordsOfBlock] = {};
    if (const auto row = row_of(args, panel, column))
      std::memcpy(words, weight + *row * args.row_bytes + begin, count < kBytes ? count : kBytes);
    Word* tile = block + column / kTile * kTile * kWordsOfBlock + column % kTile;
    for (int64_t word = 0; word < kWordsOfBlock; ++word) tile[word * kTile] = words[word];
  }
}

template <class Word>
void pack_panels(const OpenMp& openmp, const PackArgs& args) {
  constexpr int64_t kBytes = kWordsOfBlock * sizeof(Word);
  const int64_t panels = num_panels(args.out_features, args.gated != 0);
  const int64_t blocks = padded(args.in_bytes, kBytes) / kBytes;
  want_huge_pages(args.packed, panels * blocks * kBytes * kPanel);
  std::atomic<int64_t> next = 0;
  run_on_threads(openmp, args.threads, [&] {
    for (int64_t panel; (panel = next.fetch_add(1, std::memory_order_relaxed)) < panels;) {
      Word* packed = static_cast<Word*>(args.packed) + panel * blocks * kWordsOfBlock * kPanel;
      for (int64_t block = 0; block < blocks; ++block, packed += kWordsOfBlock * kPanel)
        pack_block(args, packed, panel, block * kBytes, args.in_bytes - block * kBytes);
    }
  });
}

}  // namespace
}  // namespace quire

int32_t quire_pack_weight(const quire::Context* context, const quire::PackArgs* args) {
  switch (args->word_bytes) {
    case 1:
      quire::pack_panels<uint8_t>(context->openmp, *args);
      break;
    case 2:
      quire::pack_panels<uint16_t>(context->openmp, *args);
      break;
    default:
      quire::pack_panels<uint32_t>(context->openmp, *args);
  }
  return quire::kOk;
}
