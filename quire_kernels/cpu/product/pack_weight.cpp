// Packs weights into the order in which product.cpp reads them, and compresses bfloat16 weights to 12 bits (bf12.h).
//
// A panel is kPanel columns of the product. It is a row of blocks. A block is two tiles of 16 columns, and a tile has
// 16 lines of words. A word holds the weights that a word of a token is multiplied with: a float, two 16-bit numbers,
// or four int8 values where tokens are int8. Where tokens are floating and weights int8, it has 1 or 2 bytes instead of
// 4. So a vector multiplies a line of a tile by one word of a token, a matrix unit loads a tile, and a thread reads its
// panels in the order of memory.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "product/bf12.h"
#include "product/packing.h"
#include "runtime/api.h"

namespace quire {
namespace {

// Packs one block of a panel: `count` remaining bytes of the weight's rows, from `begin` on.
template <class Word>
void pack_block(const PackArgs& args, Word* block, int64_t panel, int64_t begin, int64_t count) {
  constexpr int64_t kBytes = kWordsOfBlock * sizeof(Word);
  const std::byte* weight = static_cast<const std::byte*>(args.weight);
  for (int64_t column = 0; column < kPanel; ++column) {
    Word words[kWordsOfBlock] = {};
    if (const auto row = row_of(args, panel, column))
      std::memcpy(words, weight + *row * args.row_bytes + begin, count < kBytes ? count : kBytes);
    Word* tile = block + column / kColumnsOfTile * kColumnsOfTile * kWordsOfBlock + column % kColumnsOfTile;
    for (int64_t word = 0; word < kWordsOfBlock; ++word) tile[word * kColumnsOfTile] = words[word];
  }
}

template <class Word>
void pack_panels(const OpenMp& openmp, const PackArgs& args) {
  constexpr int64_t kBytes = kWordsOfBlock * sizeof(Word);
  const int64_t panels = num_panels(args.out_features, args.gated != 0);
  const int64_t blocks = padded(args.in_bytes, kBytes) / kBytes;
  for_each_panel(openmp, args.threads, panels, [&](int64_t panel) {
    Word* packed = static_cast<Word*>(args.packed) + panel * blocks * kWordsOfBlock * kPanel;
    for (int64_t block = 0; block < blocks; ++block, packed += kWordsOfBlock * kPanel)
      pack_block(args, packed, panel, block * kBytes, args.in_bytes - block * kBytes);
  });
}

constexpr uint8_t kNoPlace = 0xff;

inline uint8_t upper_of(uint16_t bits) { return static_cast<uint8_t>(bits >> 8); }

// A panel, packed and compressed.
class Panel {
 public:
  Panel(const CompressArgs& args, int64_t panel)
      : numbers_(static_cast<const uint16_t*>(args.packed) + panel * args.numbers),
        count_(args.numbers),
        head_(reinterpret_cast<Bf12Head*>(static_cast<std::byte*>(args.compressed) +
                                          panel * bf12_panel_bytes(args.numbers))) {}

  Bf12Head& head() const { return *head_; }

  // Fills in the table, and the number of exceptions.
  void choose_upper_bytes() const {
    std::array<int64_t, 256> counts = {};
    for (int64_t i = 0; i < count_; ++i) ++counts[upper_of(numbers_[i])];
    std::array<uint8_t, 256> bytes;
    std::iota(bytes.begin(), bytes.end(), 0);
    std::partial_sort(bytes.begin(), bytes.begin() + kBf12TableSize, bytes.end(),
                      [&](int a, int b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
    std::copy_n(bytes.begin(), kBf12TableSize, head_->upper);
    head_->num_exceptions = count_;
    for (const uint8_t byte : head_->upper) head_->num_exceptions -= counts[byte];
  }

  // Writes the groups, and exceptions from the head's first on.
  void write(Bf12Exception* exceptions) const {
    std::array<uint8_t, 256> places;
    places.fill(kNoPlace);
    for (int i = 0; i < kBf12TableSize; ++i) places[head_->upper[i]] = static_cast<uint8_t>(i);
    Bf12Exception* exception = exceptions + head_->first_exception;
    Bf12Group* group = reinterpret_cast<Bf12Group*>(head_ + 1);
    for (int64_t i = 0; i < count_; i += Bf12Group::kNumbers, ++group) {
      std::memset(group->places, 0, sizeof(group->places));
      for (int64_t j = 0; j < Bf12Group::kNumbers; ++j) {
        const uint16_t bits = numbers_[i + j];
        const uint8_t place = places[upper_of(bits)];
        const int64_t half = j / 64, byte = j % 32 / 8 * 16 + j % 64 / 32 * 8 + j % 8;
        group->lower[half][byte] = static_cast<uint8_t>(bits);
        if (place == kNoPlace)
          *exception++ = {static_cast<uint32_t>(i + j), bits, 0};
        else
          group->places[byte] |= static_cast<uint8_t>(place << 4 * half);
      }
    }
  }

 private:
  const uint16_t* numbers_;
  const int64_t count_;
  Bf12Head* head_;
};

}  // namespace
}  // namespace quire

int32_t quire_pack_weight(const quire::Context* context, const quire::PackArgs* args) {
  if (quire::is_coded(args->stored)) {
    quire::pack_coded(context->openmp, *args);
    return quire::kOk;
  }
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

int32_t quire_compress_weight(const quire::Context* context, const quire::CompressArgs* args) {
  using namespace quire;
  const int64_t panels_bytes = args->panels * bf12_panel_bytes(args->numbers);
  for_each_panel(context->openmp, args->threads, args->panels,
                 [&](int64_t i) { Panel(*args, i).choose_upper_bytes(); });
  int64_t exceptions = 0;
  for (int64_t i = 0; i < args->panels; ++i) {
    Bf12Head& head = Panel(*args, i).head();
    head.first_exception = exceptions;
    exceptions += head.num_exceptions;
  }
  *args->num_exceptions = exceptions;
  if (exceptions > args->max_exceptions) return kOk;
  std::byte* end = static_cast<std::byte*>(args->compressed) + panels_bytes;
  for_each_panel(context->openmp, args->threads, args->panels,
                 [&](int64_t i) { Panel(*args, i).write(reinterpret_cast<Bf12Exception*>(end)); });
  return kOk;
}
