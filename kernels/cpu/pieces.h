// The tokens of a row's context by the blocks that they lie in, and where keys and values of their heads are.
#pragma once

#include "context.h"
#include "short_block.h"

namespace quire::QUIRE_ISA {
namespace {

// Tokens of one block.
template <class Stored>
struct Piece {
  const Stored* keys;  // of the block, all heads
  int first, count;
  bool short_keys, short_values;
};

// Some tokens of a row.
template <class Stored, int kCapacity>
struct Pieces {
  int count = 0;  // of tokens
  int num_pieces = 0;
  Piece<Stored> pieces[kCapacity];

  // The next ones from `token` up to `end`, at most kCapacity. Which blocks are short is a guess until `look`: those that are full.
  void fill(const AttentionArgs& args, int64_t row, int64_t token, int64_t end) {
    const int32_t* table = args.block_tables + row * args.table_stride;
    const int64_t block = args.num_kv_heads * args.block_size * line_size<Stored>(args);
    int64_t column = token / args.block_size, first = token - column * args.block_size;
    int64_t left = end - token < kCapacity ? end - token : kCapacity;
    count = left > 0 ? static_cast<int>(left) : 0;
    for (num_pieces = 0; left > 0; ++column, first = 0) {
      const int64_t tokens = args.block_size - first < left ? args.block_size - first : left;
      const bool is_full = args.short_blocks && (column + 1) * args.block_size <= args.seq_lens[row];
      pieces[num_pieces++] = {static_cast<const Stored*>(args.kv_cache) + table[column] * block, static_cast<int>(first),
                              static_cast<int>(tokens), is_full, is_full};
      left -= tokens;
    }
  }

  // Reads of each block whether it is short.
  void look(const AttentionArgs& args) {
    if (!args.short_blocks) return;
    for (int i = 0; i < num_pieces; ++i) {
      pieces[i].short_keys = is_short(pieces[i].keys);
      pieces[i].short_values = is_short(pieces[i].keys + value_offset<Stored>(args));
    }
  }
};

// Keys or values of one head in a piece.
template <class Stored>
class Part {
 public:
  Part(const AttentionArgs& args, const Piece<Stored>& piece, int64_t head, bool values)
      : args_(&args), piece_(&piece), head_(head), values_(values) {}

  int count() const { return piece_->count; }
  bool is_short() const { return values_ ? piece_->short_values : piece_->short_keys; }

  // If it is short: the tile, which has all of the block's tokens, and where in it the part's numbers are.
  int64_t tile_numbers() const { return args_->block_size * args_->head_dim; }
  int64_t first_number() const { return piece_->first * args_->head_dim; }
  int64_t first_group() const { return first_number() / ShortGroup::kNumbers; }
  int64_t last_group() const {
    return (first_number() + piece_->count * args_->head_dim + ShortGroup::kNumbers - 1) / ShortGroup::kNumbers;
  }
  const ShortTile& tile() const {
    return *reinterpret_cast<const ShortTile*>(reinterpret_cast<const std::byte*>(block()) +
                                               head_ * short_tile_bytes(tile_numbers()));
  }

  // If it is not.
  const Stored* tokens() const {
    return block() + (head_ * args_->block_size + piece_->first) * line_size<Stored>(*args_);
  }

  // The memory that is read of it: of a short tile the head with the first of its tokens, what is behind its numbers with the last.
  const char* begin() const {
    if (!is_short()) return reinterpret_cast<const char*>(tokens());
    return piece_->first == 0 ? tile_memory() : reinterpret_cast<const char*>(groups_of(tile()) + first_group());
  }
  const char* end() const {
    if (!is_short()) return begin() + piece_->count * line_size<Stored>(*args_) * static_cast<int64_t>(sizeof(Stored));
    if (piece_->first + piece_->count == args_->block_size) return tile_memory() + short_tile_bytes(tile_numbers());
    return reinterpret_cast<const char*>(groups_of(tile()) + last_group());
  }

 private:
  const char* tile_memory() const { return reinterpret_cast<const char*>(&tile()); }
  const Stored* block() const { return piece_->keys + (values_ ? value_offset<Stored>(*args_) : 0); }

  const AttentionArgs* args_;
  const Piece<Stored>* piece_;
  int64_t head_;
  bool values_;
};

constexpr int64_t num_lines(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine; }

// Memory to ask for, bit by bit: a processor that waits until memory takes more requests does nothing else.
struct LinesAhead {
  const char *next = nullptr, *end = nullptr;

  void fetch(int64_t lines) {
    for (; lines > 0 && next < end; --lines, next += kCacheLine) ask_for<kAheadCache>(next);
  }
  void fetch_all() {
    for (; next < end; next += kCacheLine) ask_for<kAheadCache>(next);
  }
};

// Numbers of a short part, made in memory from `to` on, which is moved behind them. Returns its first token.
inline const BF16* make_tokens(const Part<BF16>& part, LinesAhead& ahead, BF16*& to) {
  constexpr int64_t kNumbers = ShortGroup::kNumbers;
  const int64_t first = part.first_group(), last = part.last_group(), start = first * kNumbers;
  const ShortTile& tile = part.tile();
  const ByteVector table = load_table(tile.upper);
  BF16* const made = to;
  for (int64_t i = first; i < last; ++i, to += kNumbers) {
    make_long(to, groups_of(tile)[i], table);
    ahead.fetch(1);
  }
  for_exceptions(tile, part.tile_numbers(), [&](TileException exception) {
    if (exception.number >= start && exception.number < last * kNumbers) made[exception.number - start].bits = exception.bits;
  });
  return made + part.first_number() - start;
}

// Numbers that the tokens of Pieces may need memory for when they are made.
template <int kCapacity>
inline int64_t made_numbers(const AttentionArgs& args) {
  return kCapacity * args.head_dim + 2 * ShortGroup::kNumbers * (kCapacity / args.block_size + 2);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
