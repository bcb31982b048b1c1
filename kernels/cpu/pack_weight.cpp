// Weights in the order in which product.cpp reads them.
//
// A panel is kPanel columns of the product. It is a row of blocks: two tiles of 16 columns, each 16 lines of words, which
// are what a word of a token is multiplied with: a float, two shorter numbers, or four codes where tokens are codes. So a line
// of a tile is what a vector multiplies by one word of a token, a tile is what a matrix unit loads, and a thread reads its
// panels from end to end without a jump.
#include <sys/mman.h>

#include <cstdint>

#include "api.h"
#include "isa.h"

namespace quire {
namespace {

constexpr int64_t kTile = kPanel / 2;

// The row of the weight that column `column` of a panel holds, or -1 where it is filled up.
int64_t row_of(const PackArgs& args, int64_t panel, int64_t column) {
  if (!args.gated) {
    const int64_t row = panel * kPanel + column;
    return row < args.out_features ? row : -1;
  }
  const int64_t half = args.out_features / 2, row = panel * kTile + column % kTile;
  if (row >= half) return -1;
  return column < kTile ? row : half + row;
}

// One column of a panel.
template <class Element, int64_t kOfWord>
void pack_column(const PackArgs& args, Element* panel, int64_t column, const Element* row) {
  constexpr int64_t kLines = kWordsOfBlock * kOfWord, kTileLine = kTile * kOfWord;
  const int64_t lines = padded(args.in_features, kLines);
  for (int64_t k = 0; k < lines; ++k) {
    Element* tile = panel + k / kLines * kLines * kPanel + column / kTile * kLines * kTile;
    const int64_t word = k % kLines / kOfWord;
    tile[word * kTileLine + column % kTile * kOfWord + k % kOfWord] = row != nullptr && k < args.in_features ? row[k] : 0;
  }
}

// Asks for pages of 2 MB while none is touched yet: a product jumps between threads' panels, and a page each 4 kB costs.
void want_huge_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) & ~(kHuge - 1);
  // Where the system refuses, small pages do.
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

template <class Element, int64_t kOfWord>
void pack_panels(const PackArgs& args) {
  const int64_t panels = num_panels(args.out_features, args.gated != 0);
  const int64_t size = padded(args.in_features, kWordsOfBlock * kOfWord) * kPanel;
  want_huge_pages(args.packed, panels * size * sizeof(Element));
  const Element* weight = static_cast<const Element*>(args.weight);
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t row = row_of(args, panel, column);
      pack_column<Element, kOfWord>(args, static_cast<Element*>(args.packed) + panel * size, column,
                                    row < 0 ? nullptr : weight + row * args.weight_stride);
    }
  }
}

}  // namespace
}  // namespace quire

int32_t quire_pack_weight(const quire::Context*, const quire::PackArgs* args) {
  const bool floats = args->dtype == quire::kFloat32;
  switch (args->multiplied) {
    case quire::kNumbers:
      floats ? quire::pack_panels<uint32_t, 1>(*args) : quire::pack_panels<uint16_t, 2>(*args);
      break;
    case quire::kCodes:
      floats ? quire::pack_panels<uint8_t, 1>(*args) : quire::pack_panels<uint8_t, 2>(*args);
      break;
    default:
      quire::pack_panels<uint8_t, 4>(*args);
  }
  return quire::kOk;
}
