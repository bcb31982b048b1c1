// Packs rows of codes into coded panels (coded.h), code for code, and looks rows of GGUF files up.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "product/coded.h"
#include "product/packing.h"
#include "runtime/api.h"

namespace quire {
namespace {

// 32 inputs of a row.
struct Piece {
  std::array<uint8_t, 32> codes;
  std::array<uint8_t, 2> scales;  // int8
  uint8_t minimum;
  uint16_t scale_of_group, minimum_of_group;  // F16
};

inline uint16_t word_at(const uint8_t* bytes) {
  uint16_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// The `piece`-th codes of 4 bits, of 64 numbers after 64: 32 in the lower halves of bytes, 32 in the upper ones.
inline uint8_t nibble(const uint8_t* bytes, int64_t piece, int64_t i) {
  return bytes[piece / 2 * 32 + i] >> piece % 2 * 4 & 15;
}

// The same of 32 numbers after 32, where 16 are in the lower halves.
inline uint8_t near_nibble(const uint8_t* bytes, int64_t piece, int64_t i) {
  return bytes[piece * 16 + i % 16] >> i / 16 * 4 & 15;
}

// Eight scales and eight minima of 6 bits each.
inline void read_scales_and_minima(const uint8_t* bytes, int64_t piece, Piece& to) {
  if (piece < 4) {
    to.scales[0] = bytes[piece] & 63;
    to.minimum = bytes[piece + 4] & 63;
  } else {
    to.scales[0] = (bytes[piece + 4] & 15) | bytes[piece - 4] >> 6 << 4;
    to.minimum = bytes[piece + 4] >> 4 | bytes[piece] >> 6 << 4;
  }
}

// How a file stores a group of a row. `read` gets its first byte, and the number of the piece in it.
template <class Format>
struct Stored;

template <>
struct Stored<Q4K> {
  static constexpr int64_t kBytes = 144;
  static void read(const uint8_t* group, int64_t piece, Piece& to) {
    to.scale_of_group = word_at(group);
    to.minimum_of_group = word_at(group + 2);
    read_scales_and_minima(group + 4, piece, to);
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = nibble(group + 16, piece, i);
  }
};

template <>
struct Stored<Q5K> {
  static constexpr int64_t kBytes = 176;
  static void read(const uint8_t* group, int64_t piece, Piece& to) {
    to.scale_of_group = word_at(group);
    to.minimum_of_group = word_at(group + 2);
    read_scales_and_minima(group + 4, piece, to);
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = nibble(group + 48, piece, i) | (group[16 + i] >> piece & 1) << 4;
  }
};

template <>
struct Stored<Q6K> {
  static constexpr int64_t kBytes = 210;
  static void read(const uint8_t* group, int64_t piece, Piece& to) {
    const int64_t half = piece / 4, quarter = piece % 4;
    const uint8_t *low = group + half * 64 + quarter % 2 * 32, *high = group + 128 + half * 32;
    std::memcpy(to.scales.data(), group + 192 + 2 * piece, 2);
    to.scale_of_group = word_at(group + 208);
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4;
  }
};

template <>
struct Stored<Q80> {
  static constexpr int64_t kBytes = 34;
  static void read(const uint8_t* group, int64_t, Piece& to) {
    to.scale_of_group = word_at(group);
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = group[2 + i] ^ 0x80;
  }
};

template <>
struct Stored<Q40> {
  static constexpr int64_t kBytes = 18;
  static void read(const uint8_t* group, int64_t, Piece& to) {
    to.scale_of_group = word_at(group);
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = near_nibble(group + 2, 0, i);
  }
};

// The file has an addend, which is a negative minimum.
inline uint16_t negative(uint16_t half) { return half ^ 0x8000; }

template <>
struct Stored<Q41> {
  static constexpr int64_t kBytes = 20;
  static void read(const uint8_t* group, int64_t, Piece& to) {
    to.scale_of_group = word_at(group);
    to.minimum_of_group = negative(word_at(group + 2));
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = near_nibble(group + 4, 0, i);
  }
};

template <>
struct Stored<Q50> {
  static constexpr int64_t kBytes = 22;
  static void read(const uint8_t* group, int64_t, Piece& to) {
    to.scale_of_group = word_at(group);
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = near_nibble(group + 6, 0, i) | (group[2 + i / 8] >> i % 8 & 1) << 4;
  }
};

template <>
struct Stored<Q51> {
  static constexpr int64_t kBytes = 24;
  static void read(const uint8_t* group, int64_t, Piece& to) {
    to.scale_of_group = word_at(group);
    to.minimum_of_group = negative(word_at(group + 2));
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = near_nibble(group + 8, 0, i) | (group[4 + i / 8] >> i % 8 & 1) << 4;
  }
};

template <>
struct Stored<Iq4Nl> {
  static constexpr int64_t kBytes = 18;
  static void read(const uint8_t* group, int64_t piece, Piece& to) { Stored<Q40>::read(group, piece, to); }
};

template <>
struct Stored<Iq4Xs> {
  static constexpr int64_t kBytes = 136;
  static void read(const uint8_t* group, int64_t piece, Piece& to) {
    to.scale_of_group = word_at(group);
    const int low = group[4 + piece / 2] >> piece % 2 * 4 & 15, high = word_at(group + 2) >> 2 * piece & 3;
    to.scales[0] = static_cast<uint8_t>((low | high << 4) - 32);
    for (int64_t i = 0; i < 32; ++i) to.codes[i] = near_nibble(group + 8, piece, i);
  }
};

// The bytes with even places, one after the other.
inline uint64_t even_bytes(uint64_t x) {
  x &= 0x00ff00ff00ff00ff;
  x = (x | x >> 8) & 0x0000ffff0000ffff;
  return (x | x >> 16) & 0xffffffff;
}

// Puts the codes of a piece of a column into its block, which was zero: of 8 inputs, 8 bytes of a chunk.
template <class Format>
void put_codes(const std::array<uint8_t, 32>& all, int64_t column, uint8_t* block) {
  block += Format::kScaleBytes + column / kColumnsOfTile * (kPanel / 8) * Format::kCodeBytes;
  const int64_t half = column % kColumnsOfTile / 8, lane = column % 8;
  for (int64_t i = 0; i < kPanel; i += 8, block += Format::kCodeBytes) {
    uint64_t codes, word;
    std::memcpy(&codes, all.data() + i, 8);
    codes = even_bytes(codes) | even_bytes(codes >> 8) << 32;
    if constexpr (Format::kBits == 8) {
      std::memcpy(block + 64 * half + 8 * lane, &codes, 8);
    } else {
      std::memcpy(&word, block + 8 * lane, 8);
      word |= (codes & 0x0f0f0f0f0f0f0f0f) << 4 * half;
      std::memcpy(block + 8 * lane, &word, 8);
      // The product has bit 8 i of the first factor as bit 56 + i.
      for (int bit = 4; bit < Format::kBits; ++bit)
        block[64 + 16 * (bit - 4) + 8 * half + lane] =
            static_cast<uint8_t>((codes >> bit & 0x0101010101010101) * 0x0102040810204080 >> 56);
    }
  }
}

// The same for its scales too, and its group's numbers into the head.
template <class Format>
void put(const Piece& piece, int64_t column, uint8_t* head, uint8_t* block) {
  std::memcpy(head + 2 * column, &piece.scale_of_group, 2);
  if (Format::kMinima) std::memcpy(head + 2 * (kPanel + column), &piece.minimum_of_group, 2);
  for (int part = 0; part < Format::kParts; ++part) block[part * kPanel + column] = piece.scales[part];
  if (Format::kMinima && Format::kParts > 0) block[Format::kParts * kPanel + column] = piece.minimum;
  put_codes<Format>(piece.codes, column, block);
}

template <class Format>
int64_t in_features_of(const PackArgs& args) {
  if constexpr (Format::kPiecesOfGroup == 0)
    return padded(args.in_bytes * 8 / Format::kBits, kPanel);
  else
    return args.in_bytes / Stored<Format>::kBytes * Format::kPiecesOfGroup * kPanel;
}

// Packs rows that hold only codes; the first of two codes is in the lower half of a byte.
template <class Format>
void pack_scaled(const PackArgs& args, int64_t panel) {
  constexpr int64_t kPerByte = 8 / Format::kBits;
  const int64_t in_features = in_features_of<Format>(args), pieces = args.grouping.pieces;
  const int64_t groups = padded(in_features / kPanel, pieces) / pieces;
  const int64_t scale_bytes = Format::scale_bytes(args.grouping);
  const int64_t head_bytes = Format::head_bytes_of_group(args.grouping);
  const int64_t bytes = Format::panel_bytes(in_features, args.grouping);
  uint8_t* head = static_cast<uint8_t*>(args.packed) + panel * bytes;
  std::memset(head, 0, bytes);
  if (Format::kTableBytes > 0) std::memcpy(head, args.table, Format::kTableBytes);
  head += Format::kTableBytes;
  for (int64_t column = 0; column < kPanel; ++column) {
    const auto row = row_of(args, panel, column);
    if (!row) continue;
    const auto* scales = static_cast<const uint8_t*>(args.scales) + *row * groups * scale_bytes;
    for (int64_t group = 0; group < groups; ++group) {
      uint8_t* to = head + group * head_bytes;
      std::memcpy(to + column * scale_bytes, scales + group * scale_bytes, scale_bytes);
      if (args.grouping.has_zeros) to[kPanel * scale_bytes + column] = args.zeros[*row * groups + group];
    }
    const auto* stored = static_cast<const uint8_t*>(args.weight) + *row * args.row_bytes;
    uint8_t* block = head + groups * head_bytes;
    // Bytes of the codes of a part; a row ends with a whole part.
    constexpr int64_t kPartBytes = kPanel / kPerByte / (Format::kParts > 0 ? Format::kParts : 1);
    const int64_t parts = args.in_bytes / kPartBytes;
    for (int64_t begin = 0; begin < args.in_bytes; begin += kPanel / kPerByte, block += Format::kBlockBytes) {
      std::array<uint8_t, 32> codes = {};
      const int64_t left = args.in_bytes - begin, end = left < kPanel / kPerByte ? left : kPanel / kPerByte;
      for (int64_t i = 0; i < end; ++i)
        for (int64_t j = 0; j < kPerByte; ++j)
          codes[i * kPerByte + j] = stored[begin + i] >> j * Format::kBits & ((1 << Format::kBits) - 1);
      put_codes<Format>(codes, column, block);
      for (int64_t part = 0; part < Format::kParts && begin / kPartBytes + part < parts; ++part)
        block[part * kPanel + column] =
            static_cast<const uint8_t*>(args.parts)[*row * parts + begin / kPartBytes + part];
    }
  }
}

template <class Format>
void pack_stored(const PackArgs& args, int64_t panel) {
  const int64_t groups = args.in_bytes / Stored<Format>::kBytes;
  const int64_t in_features = in_features_of<Format>(args), bytes = Format::panel_bytes(in_features, args.grouping);
  uint8_t* head = static_cast<uint8_t*>(args.packed) + panel * bytes;
  std::memset(head, 0, bytes);
  for (int64_t column = 0; column < kPanel; ++column) {
    const auto row = row_of(args, panel, column);
    if (!row) continue;
    const uint8_t* stored = static_cast<const uint8_t*>(args.weight) + *row * args.row_bytes;
    uint8_t* block = head + Format::head_bytes(in_features, args.grouping);
    for (int64_t group = 0; group < groups; ++group, stored += Stored<Format>::kBytes)
      for (int64_t i = 0; i < Format::kPiecesOfGroup; ++i, block += Format::kBlockBytes) {
        Piece piece;
        Stored<Format>::read(stored, i, piece);
        put<Format>(piece, column, head + group * Format::kHeadBytesOfGroup, block);
      }
  }
}

template <class Format>
void pack(const PackArgs& args, int64_t panel) {
  if constexpr (Format::kPiecesOfGroup == 0)
    pack_scaled<Format>(args, panel);
  else
    pack_stored<Format>(args, panel);
}

// As F16C converts it.
inline float float_of(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 0)
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f));
  return std::bit_cast<float>(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

inline uint16_t rounded_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The numbers of a row, as products have them.
template <class Format>
void look_up(const uint8_t* stored, int64_t groups, uint16_t* to) {
  for (int64_t group = 0; group < groups; ++group, stored += Stored<Format>::kBytes)
    for (int64_t i = 0; i < Format::kPiecesOfGroup; ++i, to += kPanel) {
      Piece piece;
      Stored<Format>::read(stored, i, piece);
      const float scale = float_of(piece.scale_of_group);
      const float of_piece = Format::kParts > 0 ? piece.minimum : 1;
      const float minimum = Format::kMinima ? float_of(piece.minimum_of_group) * of_piece : 0;
      for (int64_t at = 0; at < kPanel; ++at) {
        const float of_part =
            Format::kParts > 0 ? scale * static_cast<int8_t>(piece.scales[at * Format::kParts / kPanel]) : scale;
        const float number = of_part * value_of<Format>(piece.codes[at]);
        to[at] = rounded_to_bfloat16(Format::kMinima ? number - minimum : number);
      }
    }
}

// Rows that can be looked up; null for formats that no file stores in groups.
struct GroupedRows {
  decltype(&look_up<Q80>) look_up;
  int64_t bytes_of_group, numbers_of_group;
};

template <class Format>
constexpr GroupedRows grouped_rows() {
  if constexpr (Format::kPiecesOfGroup > 0)
    return {look_up<Format>, Stored<Format>::kBytes, Format::kPiecesOfGroup * kPanel};
  else
    return {};
}

}  // namespace

void pack_coded(const OpenMp& openmp, const PackArgs& args) {
  const auto pack_panel = with_format(args.stored, []<class Format>() { return pack<Format>; });
  for_each_panel(openmp, args.threads, num_panels(args.out_features, args.gated != 0),
                 [&](int64_t panel) { pack_panel(args, panel); });
}

}  // namespace quire

int32_t quire_look_up(const quire::Context* context, const quire::LookUpArgs* args) {
  using namespace quire;
  for (int64_t i = 0; i < args->num_ids; ++i)
    if (args->ids[i] < 0 || args->ids[i] >= args->num_rows) return kBadId;
  const GroupedRows rows = with_format(args->stored, []<class Format>() { return grouped_rows<Format>(); });
  if (rows.look_up == nullptr) return kOk;
  const int64_t groups = args->row_bytes / rows.bytes_of_group, in_features = groups * rows.numbers_of_group;
  for_each_panel(context->openmp, args->num_ids > 8 ? args->threads : 1, args->num_ids, [&](int64_t i) {
    rows.look_up(static_cast<const uint8_t*>(args->rows) + args->ids[i] * args->row_stride, groups,
                 static_cast<uint16_t*>(args->output) + i * in_features);
  });
  return kOk;
}

int64_t quire_coded_panel_bytes(int64_t stored, int64_t in_features, const quire::Grouping* grouping) {
  return quire::with_format(stored, [=]<class Format>() { return Format::panel_bytes(in_features, *grouping); });
}
