// Weights in the order in which product.cpp reads them.
//
// A panel is kPanel columns of the product. It is a row of blocks of kPanel lines: two tiles of 16 columns, each 16 lines of
// pairs. So a line of 64 bytes is what a vector multiplies by one pair of a token, a tile is what a matrix unit loads,
// and a thread reads its panels from end to end without a jump.
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

// One column of a panel; its lines are one pair each.
template <class Element>
void pack_column(const PackArgs& args, Element* panel, int64_t column, const Element* row) {
  const int64_t lines = padded(args.in_features, kPanel);
  for (int64_t k = 0; k < lines; ++k) {
    Element* tile = panel + k / kPanel * kPanel * kPanel + column / kTile * kTile * kPanel;
    const int64_t pair = k % kPanel / 2;
    tile[pair * kPanel + column % kTile * 2 + k % 2] = row != nullptr && k < args.in_features ? row[k] : 0;
  }
}

template <class Element>
void pack_panel(const PackArgs& args, int64_t panel) {
  Element* packed = static_cast<Element*>(args.packed) + panel * padded(args.in_features, kPanel) * kPanel;
  for (int64_t column = 0; column < kPanel; ++column) {
    const int64_t row = row_of(args, panel, column);
    const Element* weight = static_cast<const Element*>(args.weight);
    pack_column(args, packed, column, row < 0 ? nullptr : weight + row * args.weight_stride);
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

}  // namespace
}  // namespace quire

int32_t quire_pack_weight(const quire::Context*, const quire::PackArgs* args) {
  using quire::kPanel;
  const int64_t panels = quire::num_panels(args->out_features, args->gated != 0);
  quire::want_huge_pages(args->packed, panels * quire::padded(args->in_features, kPanel) * kPanel * args->element_bytes);
  const auto pack_panel = args->element_bytes == 1 ? quire::pack_panel<uint8_t> : quire::pack_panel<uint16_t>;
  for (int64_t panel = 0; panel < panels; ++panel) pack_panel(*args, panel);
  return quire::kOk;
}
