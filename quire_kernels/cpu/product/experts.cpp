#include "product/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

namespace quire {
namespace {

// Consecutive panels of an expert that a thread multiplies at once, for each 16 of its tokens, up to a maximum: the
// lines of many tokens are not read again for each few panels.
constexpr int64_t kPanelsOfUnit = 4, kMaxPanelsOfUnit = 32;

float number_at(const void* numbers, int64_t dtype, int64_t at) {
  if (dtype == kFloat32) return static_cast<const float*>(numbers)[at];
  uint32_t bits = 0;
  if (dtype == kBFloat16) bits = static_cast<uint32_t>(static_cast<const uint16_t*>(numbers)[at]) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

float sigmoid(float x) {
  const float e = std::exp(-std::fabs(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

struct Scored {
  float score;
  int64_t number;
};

// As torch's topk orders numbers, NaN first.
bool is_better(const Scored& x, const Scored& y) {
  return (std::isnan(x.score) && !std::isnan(y.score)) || x.score > y.score;
}

// Puts the best `count` of `size` first, the best of all first. As torch does it: which ones of equal scores are taken
// depends on the algorithm.
void sort_best(Scored* all, int64_t size, int64_t count) {
  if (count * 64 <= size) {
    std::partial_sort(all, all + count, all + size, is_better);
  } else {
    std::nth_element(all, all + count - 1, all + size, is_better);
    std::sort(all, all + count - 1, is_better);
  }
}

struct ChooseScratch {
  ChooseScratch(const ChooseArgs& args, std::byte* memory) {
    Arena arena(memory);
    scores = arena.take<float>(args.num_experts);
    preferences = arena.take<float>(args.num_experts);
    sorted = arena.take<Scored>(args.num_experts);
    groups = arena.take<Scored>(args.num_groups);
    bytes = arena.used();
  }

  float *scores, *preferences;
  Scored *sorted, *groups;
  int64_t bytes;
};

// The scores of a token's experts.
void score(const ChooseArgs& args, int64_t token, float* scores) {
  float highest = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t i = 0; i < args.num_experts; ++i) {
    scores[i] = number_at(args.outputs, args.dtype, token * args.output_stride + i);
    highest = std::max(highest, scores[i]);
  }
  if (args.scoring == kSigmoid) {
    for (int64_t i = 0; i < args.num_experts; ++i) scores[i] = sigmoid(scores[i]);
    return;
  }
  for (int64_t i = 0; i < args.num_experts; ++i) sum += scores[i] = std::exp(scores[i] - highest);
  for (int64_t i = 0; i < args.num_experts; ++i) scores[i] /= sum;
}

// Makes the preferences of all groups but the best ones -infinity.
void leave_groups_out(const ChooseArgs& args, const ChooseScratch& scratch) {
  const int64_t size = args.num_experts / args.num_groups;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    for (int64_t i = 0; i < size; ++i) scratch.sorted[i] = {scratch.preferences[group * size + i], i};
    sort_best(scratch.sorted, size, args.group_members);
    scratch.groups[group] = {0, group};
    for (int64_t i = 0; i < args.group_members; ++i) scratch.groups[group].score += scratch.sorted[i].score;
  }
  sort_best(scratch.groups, args.num_groups, args.num_chosen_groups);
  for (int64_t i = args.num_chosen_groups; i < args.num_groups; ++i)
    std::fill_n(scratch.preferences + scratch.groups[i].number * size, size, -std::numeric_limits<float>::infinity());
}

}  // namespace

int64_t choose_scratch(const ChooseArgs& args) { return ChooseScratch(args, nullptr).bytes; }

void choose_experts(const ChooseArgs& args, int64_t begin, int64_t end, std::byte* memory) {
  const ChooseScratch scratch(args, memory);
  for (int64_t token = begin; token < end; ++token) {
    score(args, token, scratch.scores);
    for (int64_t i = 0; i < args.num_experts; ++i)
      scratch.preferences[i] = args.correction == nullptr ? scratch.scores[i] : scratch.scores[i] + args.correction[i];
    if (args.num_groups > 1) leave_groups_out(args, scratch);
    for (int64_t i = 0; i < args.num_experts; ++i) scratch.sorted[i] = {scratch.preferences[i], i};
    sort_best(scratch.sorted, args.num_experts, args.num_chosen);
    float sum = 0;
    for (int64_t i = 0; i < args.num_chosen; ++i) sum += scratch.scores[scratch.sorted[i].number];
    for (int64_t i = 0; i < args.num_chosen; ++i) {
      const int64_t expert = scratch.sorted[i].number;
      float weight = args.normalized ? scratch.scores[expert] / sum : scratch.scores[expert];
      if (args.factors != nullptr) weight *= args.factors[expert];
      args.chosen[token * args.num_chosen + i] = expert;
      args.weights[token * args.num_chosen + i] = weight * static_cast<float>(args.scale);
    }
  }
}

namespace {

// An expert that tokens have chosen; their rows are begin to end - 1.
struct Group {
  int64_t expert, begin, end;
};

// The shared memory of a layer's works. A row is an expert of a token; rows lie expert after expert.
struct Rows {
  int64_t* num_groups;
  Group* groups;
  int64_t* ends;    // [num_experts]
  int64_t* tokens;  // [rows]
  int64_t* places;  // [T, num_chosen]: the row of each of a token's experts
  float* shared_weights;
  std::byte* x;       // the lines of `inner`, where an expert has several tokens; later the outputs of `down`
  std::byte* inner;   // its outputs
  std::byte* packed;  // the lines of a product, packed
  // Where tokens are int8: the scales of x, and the inner features as int8 lines with their scales.
  float *x_scales, *inner_scales;
  int8_t* values;
};

class Layer {
 public:
  Layer(const IsaKernels& kernels, const ExpertsArgs& args)
      : kernels_(kernels),
        args_(args),
        rows_(args.num_tokens * args.num_chosen),
        max_groups_(std::min(rows_, args.num_experts)),
        element_(args.dtype == kFloat32 ? 4 : 2),
        x_bytes_(args.inner->in_features * (is_int8() ? 1 : element_)),
        width_(is_gated(*args.inner) ? args.inner->out_features / 2 : args.inner->out_features),
        inner_stride_(is_int8() ? width_ : args.down->in_features) {
    lay_out(nullptr, &bytes_);
  }

  void add_works(const std::shared_ptr<const Layer>& self, Works& works) const {
    auto add = [&](int64_t units, int64_t grain, int64_t own_bytes, auto function) {
      auto call = [self, function](int64_t begin, int64_t end, const Scratch& scratch) {
        function(*self, self->lay_out(scratch.shared), begin, end, scratch);
      };
      works.push_back(std::make_unique<FunctionWork<decltype(call)>>(units, grain, own_bytes, bytes_, call));
    };
    auto add_product = [&](const ProductArgs* of_experts) {
      const int64_t panels = num_panels(*of_experts), rows_of_group = 1 + rows_ / args_.num_experts;
      const int64_t elements = of_experts->in_features * kPanel * panels_of_unit_ * (1 + rows_of_group / 16);
      add((panels + panels_of_unit_ - 1) / panels_of_unit_ * max_groups_, grain(kWorthReading, elements),
          most_of(of_experts, kernels_.product_scratch),
          [=](const Layer& layer, const Rows& rows, int64_t begin, int64_t end, const Scratch& scratch) {
            for (int64_t unit = begin; unit < end; ++unit) layer.multiply(of_experts, rows, unit, scratch.own);
          });
    };
    add(1, 1, 0, [](const Layer& layer, const Rows& rows, int64_t, int64_t, const Scratch&) { layer.sort(rows); });
    add_gathering(add, args_.inner);
    add_product(args_.inner);
    if (is_int8())
      add(rows_, grain(kWorthThreads, width_), 0,
          [](const Layer& layer, const Rows& rows, int64_t begin, int64_t end, const Scratch&) {
            layer.quantize(rows, begin, end);
          });
    add_gathering(add, args_.down);
    add_product(args_.down);
    add(args_.num_tokens, grain(kWorthThreads, args_.num_chosen * args_.down->out_features), 0,
        [](const Layer& layer, const Rows& rows, int64_t begin, int64_t end, const Scratch&) {
          layer.kernels_.add_experts.of[layer.args_.dtype](layer.args_, rows.x, rows.places, rows.shared_weights, begin,
                                                           end);
        });
  }

 private:
  bool is_int8() const { return args_.x_scales != nullptr; }

  Rows lay_out(std::byte* memory, int64_t* bytes = nullptr) const {
    Arena arena(memory);
    Rows rows;
    rows.num_groups = arena.take<int64_t>(1);
    rows.groups = arena.take<Group>(max_groups_);
    rows.ends = arena.take<int64_t>(args_.num_experts);
    rows.tokens = arena.take<int64_t>(rows_);
    rows.places = arena.take<int64_t>(rows_);
    rows.shared_weights = args_.shared_gate == nullptr ? nullptr : arena.take<float>(args_.num_tokens);
    rows.x = arena.take<std::byte>(rows_ * std::max(x_bytes_, args_.down->out_features * element_));
    rows.inner = arena.take<std::byte>(rows_ * inner_stride_ * element_);
    rows.packed = arena.take<std::byte>(rows_ * std::max(packed_inner_, packed_down_));
    rows.x_scales = rows.inner_scales = nullptr;
    rows.values = nullptr;
    if (is_int8()) {
      rows.x_scales = arena.take<float>(rows_);
      rows.inner_scales = arena.take<float>(rows_);
      rows.values = arena.take<int8_t>(rows_ * args_.down->in_features);
    }
    if (bytes != nullptr) *bytes = arena.used();
    return rows;
  }

  // The most that a function of products says of any expert with all tokens.
  int64_t most_of(const ProductArgs* of_experts, int64_t (*function)(const ProductArgs&)) const {
    int64_t most = 0, seen = -1;
    for (const ProductArgs* each = of_experts; each < of_experts + args_.num_experts; ++each) {
      if (each->stored == seen) continue;
      seen = each->stored;
      ProductArgs args = *each;
      args.num_tokens = args_.num_tokens;
      args.x_scales = args_.x_scales;
      most = std::max(most, function(args));
    }
    return most;
  }

  // Bytes of a packed line; 0 where all lines are multiplied as they are.
  int64_t packed_line(const ProductArgs* of_experts) const {
    return most_of(of_experts, kernels_.packed_bytes) / std::max<int64_t>(args_.num_tokens, 1);
  }

  // Groups the rows by experts: stably, so that a token's place in a group depends only on the tokens before it.
  void sort(const Rows& rows) const {
    std::fill_n(rows.ends, args_.num_experts, 0);
    for (int64_t i = 0; i < rows_; ++i) ++rows.ends[args_.chosen[i]];
    int64_t begin = 0, count = 0;
    for (int64_t expert = 0; expert < args_.num_experts; ++expert) {
      const int64_t end = begin + rows.ends[expert];
      if (begin < end) rows.groups[count++] = {expert, begin, end};
      rows.ends[expert] = begin;
      begin = end;
    }
    *rows.num_groups = count;
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t row = rows.ends[args_.chosen[i]]++, token = i / args_.num_chosen;
      rows.places[i] = row;
      rows.tokens[row] = token;
      if (is_int8()) rows.x_scales[row] = args_.x_scales[token];
    }
    if (!is_int8() && inner_stride_ > width_)
      for (int64_t row = 0; row < rows_; ++row)
        std::memset(rows.inner + (row * inner_stride_ + width_) * element_, 0, (inner_stride_ - width_) * element_);
    if (rows.shared_weights != nullptr)
      for (int64_t i = 0; i < args_.num_tokens; ++i)
        rows.shared_weights[i] = sigmoid(number_at(args_.shared_gate, args_.dtype, i));
  }

  ProductArgs product_of(const ProductArgs* of_experts, const Rows& rows, const Group& group) const {
    ProductArgs args = of_experts[group.expert];
    args.num_tokens = group.end - group.begin;
    if (of_experts == args_.down) {
      args.x_stride = args_.down->in_features;
      args.x = is_int8() ? reinterpret_cast<std::byte*>(rows.values) + group.begin * args.x_stride
                         : rows.inner + group.begin * args.x_stride * element_;
      args.x_scales = is_int8() ? rows.inner_scales + group.begin : nullptr;
      args.output_stride = args_.down->out_features;
      args.output = rows.x + group.begin * args.output_stride * element_;
      return args;
    }
    args.x_scales = is_int8() ? rows.x_scales + group.begin : nullptr;
    args.output_stride = inner_stride_;
    args.output = rows.inner + group.begin * inner_stride_ * element_;
    args.x_stride = args.in_features;
    args.x = rows.x + group.begin * x_bytes_;
    if (args.num_tokens == 1)
      args.x = static_cast<const std::byte*>(args_.x) +
               rows.tokens[group.begin] * args_.x_stride * (is_int8() ? 1 : element_);
    return args;
  }

  // Brings the lines of an expert's tokens together, and packs them. A unit is a piece of all lines.
  template <class Add>
  void add_gathering(const Add& add, const ProductArgs* of_experts) const {
    const int64_t packed = packed_line_of(of_experts);
    const bool gathers = of_experts == args_.inner && args_.num_tokens > 1;
    if (!gathers && packed == 0) return;
    constexpr int64_t kPiece = kWordsOfBlock * sizeof(int32_t);
    const int64_t line = of_experts->in_features * (is_int8() ? 1 : element_);
    const int64_t units = (packed > 0 ? packed : line) / kPiece, piece = line / std::max<int64_t>(units, 1);
    add(units, grain(kWorthThreads, rows_ * kWordsOfBlock), 0,
        [=](const Layer& layer, const Rows& rows, int64_t begin, int64_t end, const Scratch&) {
          for (const Group* group = rows.groups; group < rows.groups + *rows.num_groups; ++group) {
            if (gathers && group->end - group->begin > 1)
              for (int64_t row = group->begin; row < group->end; ++row)
                std::memcpy(rows.x + row * line + begin * piece,
                            static_cast<const std::byte*>(layer.args_.x) +
                                rows.tokens[row] * layer.args_.x_stride * (layer.is_int8() ? 1 : layer.element_) +
                                begin * piece,
                            (end - begin) * piece);
            const ProductArgs args = layer.product_of(of_experts, rows, *group);
            if (packed > 0 && layer.kernels_.packed_bytes(args) > 0)
              layer.kernels_.pack_tokens(args, begin, end, rows.packed + group->begin * packed);
          }
        });
  }

  // A unit is some panels of one expert. Units of the same panels follow each other, so that a thread has the same
  // panels of all experts, whichever experts are chosen.
  void multiply(const ProductArgs* of_experts, const Rows& rows, int64_t unit, std::byte* own) const {
    if (unit % max_groups_ >= *rows.num_groups) return;
    const Group& group = rows.groups[unit % max_groups_];
    const ProductArgs args = product_of(of_experts, rows, group);
    const int64_t panels = num_panels(args), first = unit / max_groups_ * panels_of_unit_;
    const int64_t last = std::min(first + panels_of_unit_, panels);
    const std::byte* packed = rows.packed + group.begin * packed_line_of(of_experts);
    for (int64_t start = 0; start < num_units(args); start += panels)
      kernels_.product(args, {}, start + first, start + last, own, packed);
  }

  int64_t packed_line_of(const ProductArgs* of_experts) const {
    return of_experts == args_.inner ? packed_inner_ : packed_down_;
  }

  void quantize(const Rows& rows, int64_t begin, int64_t end) const {
    QuantizeArgs args = {};
    args.values = rows.values;
    args.scales = rows.inner_scales;
    args.x = rows.inner;
    args.dtype = args_.dtype;
    args.rows = rows_;
    args.n = width_;
    args.x_stride = inner_stride_;
    args.value_stride = args_.down->in_features;
    kernels_.quantize.of[args_.dtype](args, begin, end);
  }

  const IsaKernels& kernels_;
  const ExpertsArgs args_;
  const int64_t rows_, max_groups_, element_, x_bytes_, width_, inner_stride_;
  const int64_t packed_inner_ = packed_line(args_.inner), packed_down_ = packed_line(args_.down);
  const int64_t panels_of_unit_ =
      std::clamp<int64_t>(rows_ / args_.num_experts / 16 * kPanelsOfUnit, kPanelsOfUnit, kMaxPanelsOfUnit);
  int64_t bytes_ = 0;
};

}  // namespace

void add_experts_works(const IsaKernels& kernels, const ExpertsArgs& args, Works& works) {
  if (args.num_tokens == 0) return;
  const auto layer = std::make_shared<const Layer>(kernels, args);
  layer->add_works(layer, works);
}

}  // namespace quire
