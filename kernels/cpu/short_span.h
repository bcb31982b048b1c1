// The tokens of a row's context in a pool that has short blocks (short_block.h), and their numbers.
#pragma once

#include "context.h"
#include "short_block.h"

namespace quire::QUIRE_ISA {
namespace {

// By the blocks that the tokens lie in.
template <int kCapacity>
struct ShortSpan {
  struct Piece {
    const BF16* keys;  // of the block, all heads
    int first, count;  // tokens of the block
    bool short_keys, short_values;
  };

  int num_pieces = 0;
  Piece pieces[kCapacity];

  // The next tokens from `token` up to `end`, at most kCapacity. Which blocks are short is a guess until `look`.
  void fill(const AttentionArgs& args, int64_t row, int64_t token, int64_t end) {
    const int32_t* table = args.block_tables + row * args.table_stride;
    const int64_t block = args.num_kv_heads * args.block_size * args.head_dim;
    int64_t column = token / args.block_size, first = token - column * args.block_size;
    int64_t left = end - token < kCapacity ? end - token : kCapacity;
    for (num_pieces = 0; left > 0; ++column, first = 0) {
      const int64_t tokens = args.block_size - first < left ? args.block_size - first : left;
      const bool is_full = tokens == args.block_size;
      pieces[num_pieces++] = {static_cast<const BF16*>(args.kv_cache) + table[column] * block, static_cast<int>(first),
                              static_cast<int>(tokens), is_full, is_full};
      left -= tokens;
    }
  }

  // Reads of each block whether it is short.
  void look(const AttentionArgs& args) {
    for (int i = 0; i < num_pieces; ++i) {
      pieces[i].short_keys = is_short(pieces[i].keys);
      pieces[i].short_values = is_short(pieces[i].keys + value_offset<BF16>(args));
    }
  }

  // Numbers that `make_numbers` may need memory for.
  static int64_t room(const AttentionArgs& args) {
    return kCapacity * args.head_dim + 2 * ShortGroup::kNumbers * (kCapacity / args.block_size + 2);
  }
};

// Keys or values of one head in a span.
template <int kCapacity>
struct ShortPlace {
  const AttentionArgs* args;
  const ShortSpan<kCapacity>* span;
  int64_t head;
  bool values;

  int64_t numbers() const { return args->block_size * args->head_dim; }  // of a tile

  ShortPlace of_values() const { return {args, span, head, true}; }

  bool is_short(int piece) const { return values ? span->pieces[piece].short_values : span->pieces[piece].short_keys; }

  // Where the piece is, if it is short.
  const ShortTile& tile(int piece) const {
    return *reinterpret_cast<const ShortTile*>(reinterpret_cast<const std::byte*>(block(piece)) +
                                               head * short_tile_bytes(numbers()));
  }

  // The same if it is not.
  const BF16* tokens(int piece) const {
    return block(piece) + head * numbers() + span->pieces[piece].first * args->head_dim;
  }

 private:
  const BF16* block(int piece) const { return span->pieces[piece].keys + (values ? value_offset<BF16>(*args) : 0); }
};

// The memory of a place, which is asked for bit by bit: a processor that waits until memory takes more requests does nothing
// else.
template <int kCapacity>
class LinesAhead {
 public:
  explicit LinesAhead(const ShortPlace<kCapacity>& place) : place_(place) {}

  void fetch(int64_t lines) {
    for (; lines > 0; --lines, line_ += kCacheLine) {
      if (line_ >= end_ && !next_piece()) return;
      _mm_prefetch(line_, _MM_HINT_T0);
    }
  }

  // As of a Place, for as many elements of any token; of a short tile the rest is asked for while numbers are made.
  void fetch_key(int, int64_t elements) { fetch_elements(elements); }
  void fetch_value(int, int64_t, int64_t elements) { fetch_elements(elements); }

  void fetch_all() {
    do {
      for (; line_ < end_; line_ += kCacheLine) _mm_prefetch(line_, _MM_HINT_T0);
    } while (next_piece());
  }

 private:
  void fetch_elements(int64_t elements) {
    constexpr int64_t kBytes = kCacheLine, kNumbers = kCacheLine / sizeof(BF16);
    fetch(is_short_ ? (elements + kBytes - 1) / kBytes : (elements + kNumbers - 1) / kNumbers);
  }

  bool next_piece() {
    if (piece_ >= place_.span->num_pieces) return false;
    is_short_ = place_.is_short(piece_);
    if (is_short_) {
      line_ = reinterpret_cast<const char*>(&place_.tile(piece_));
      end_ = line_ + short_tile_bytes(place_.numbers());
    } else {
      line_ = reinterpret_cast<const char*>(place_.tokens(piece_));
      end_ = line_ + place_.span->pieces[piece_].count * place_.args->head_dim * sizeof(BF16);
    }
    ++piece_;
    return true;
  }

  const ShortPlace<kCapacity> place_;
  const char *line_ = nullptr, *end_ = nullptr;
  int piece_ = 0;
  bool is_short_ = false;
};

struct NothingAhead {
  void fetch(int64_t) {}
};

// Numbers of a short tile that has so many, made in memory from `to` on, which is moved behind them. Returns where the first is.
template <class Ahead>
inline const BF16* make_tokens(const ShortTile& tile, int64_t numbers, int64_t first_number, int64_t last_number, Ahead& ahead,
                               BF16*& to) {
  constexpr int64_t kNumbers = ShortGroup::kNumbers;
  const int64_t first = first_number / kNumbers, last = (last_number + kNumbers - 1) / kNumbers, start = first * kNumbers;
  const ByteVector table = load_table(tile.upper);
  BF16* const made = to;
  for (int64_t i = first; i < last; ++i, to += kNumbers) {
    make_long(to, tile.groups()[i], table);
    ahead.fetch(1);
  }
  for_exceptions(tile, numbers, [&](TileException exception) {
    if (exception.number >= start && exception.number < last * kNumbers) made[exception.number - start].bits = exception.bits;
  });
  return made + first_number - start;
}

// Where the tokens of a place are, those of short blocks made in `memory`, which has ShortSpan::room. Meanwhile asks for what is
// ahead.
template <int kCapacity, class Ahead>
void make_numbers(const ShortPlace<kCapacity>& place, Ahead& ahead, BF16* memory, Span<BF16, kCapacity>& tokens) {
  const int64_t head_dim = place.args->head_dim;
  int n = 0;
  for (int i = 0; i < place.span->num_pieces; ++i) {
    const auto& piece = place.span->pieces[i];
    const BF16* token;
    if (place.is_short(i)) {
      token = make_tokens(place.tile(i), place.numbers(), piece.first * head_dim, (piece.first + piece.count) * head_dim, ahead,
                          memory);
    } else {
      token = place.tokens(i);
    }
    for (int t = 0; t < piece.count; ++t, token += head_dim) tokens.lines[n++] = token;
  }
  tokens.count = n;
  for (; n < kCapacity; ++n) tokens.lines[n] = tokens.lines[tokens.count - 1];
}

}  // namespace
}  // namespace quire::QUIRE_ISA
