// Where the tiles of a state are. A tile is [lines][kColumns] floats; quire_kernels/states.py has the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/api.h"
#include "runtime/isa.h"

namespace quire {

inline constexpr int64_t kColumns = 16;

// Unnamed, so that each file has its own copy (isa.h).
namespace {

inline int64_t num_groups(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

// The tiles of one layer.
class Tiles {
 public:
  Tiles(const StatePages& pages, int64_t lines)
      : pages_(pages),
        tile_bytes_(lines * kColumns * static_cast<int64_t>(sizeof(float))),
        tiles_per_unit_(pages.unit_bytes / tile_bytes_) {}

  int64_t tile_bytes() const { return tile_bytes_; }

  float* of_row(const StateRow& row, int64_t tile) const {
    return find(pages_.tables + row.row * pages_.table_stride, tile);
  }

  // Whether the state after this token is written to a checkpoint.
  bool has_checkpoint(int64_t token) const { return pages_.checkpoints[token] >= 0; }

  // One that has.
  float* of_checkpoint(int64_t token, int64_t tile) const {
    return find(pages_.checkpoint_tables + pages_.checkpoints[token] * pages_.checkpoint_stride, tile);
  }

 private:
  float* find(const int32_t* table, int64_t tile) const {
    const int64_t unit = pages_.first_unit + tile / tiles_per_unit_;
    std::byte* block =
        static_cast<std::byte*>(pages_.pages) + table[unit / pages_.units_per_block] * pages_.block_stride;
    return reinterpret_cast<float*>(block + unit % pages_.units_per_block * pages_.unit_bytes +
                                    tile % tiles_per_unit_ * tile_bytes_);
  }

  const StatePages& pages_;
  const int64_t tile_bytes_, tiles_per_unit_;
};

// Calls steps(states, begin, end) for the tokens of a row from `begin` to `end` - 1, counted from its first one, in
// spans whose states lie in one place: in the pages while tokens are kept, then in `rest`, which has room for kTiles
// tiles and is kept from one call to the next. Writes checkpoints between. `states` are kTiles tiles from `tile` on.
template <int kTiles, class Steps>
inline void for_spans(const Tiles& tiles, const StateRow& row, int64_t tile, int64_t begin, int64_t end, float* rest,
                      const Steps& steps) {
  const int64_t bytes = tiles.tile_bytes();
  float *own[kTiles], *others[kTiles];
  for (int i = 0; i < kTiles; ++i) {
    own[i] = tiles.of_row(row, tile + i);
    others[i] = rest + i * (bytes / static_cast<int64_t>(sizeof(float)));
    if (begin == 0 && row.is_new) std::memset(row.num_kept > 0 ? own[i] : others[i], 0, bytes);
  }
  while (begin < end) {
    const bool is_kept = begin < row.num_kept;
    if (begin == row.num_kept && (begin > 0 || !row.is_new))
      for (int i = 0; i < kTiles; ++i) std::memcpy(others[i], own[i], bytes);
    int64_t stop = is_kept && row.num_kept < end ? row.num_kept : end;
    bool has_checkpoint = false;
    for (int64_t token = begin; is_kept && !has_checkpoint && token < stop; ++token) {
      has_checkpoint = tiles.has_checkpoint(row.first_token + token);
      if (has_checkpoint) stop = token + 1;
    }
    steps(is_kept ? own : others, begin, stop);
    if (has_checkpoint)
      for (int i = 0; i < kTiles; ++i)
        std::memcpy(tiles.of_checkpoint(row.first_token + stop - 1, tile + i), own[i], bytes);
    begin = stop;
  }
}

}  // namespace
}  // namespace quire
