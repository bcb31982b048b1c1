#include "operations.h"

#include <limits>
#include <utility>

namespace quire {
namespace {

// Elements below which a second thread takes longer to wake than it saves.
constexpr int64_t kWorthThreads = 1 << 15;
// Elements of weights below which the same holds for the reading of them.
constexpr int64_t kWorthReading = 1 << 17;

int64_t grain(int64_t worth, int64_t elements_of_unit) { return 1 + worth / std::max<int64_t>(elements_of_unit, 1); }

template <class Function>
class FunctionWork : public Work {
 public:
  FunctionWork(int64_t units, int64_t grain, int64_t scratch_bytes, Function function)
      : Work(units, grain, std::numeric_limits<int64_t>::max(), scratch_bytes), function_(std::move(function)) {}

 private:
  void run(int64_t begin, int64_t end, std::byte* scratch) const override { function_(begin, end, scratch); }

  const Function function_;
};

Status check_tokens(const RotaryArgs& args) {
  const int64_t num_slots = args.cache.num_blocks * args.cache.block_size;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    if (args.positions != nullptr && (args.positions[token] < 0 || args.positions[token] >= args.max_position))
      return kBadPosition;
    if (args.cache.kv_cache == nullptr) continue;
    if (args.cache.slot_mapping[token] < 0 || args.cache.slot_mapping[token] >= num_slots) return kBadSlot;
  }
  return kOk;
}

}  // namespace

template <class Function>
Status Operations::add(int64_t units, int64_t grain, Function function, int64_t scratch_bytes) {
  works_.push_back(std::make_unique<FunctionWork<Function>>(units, grain, scratch_bytes, std::move(function)));
  return kOk;
}

Status Operations::add_paged_attention(const AttentionArgs& args) {
  if (plan_ == nullptr || !plan_->fits(args)) {
    if (const Status status = check_rows(args); status != kOk) return status;
    plan_ = std::make_shared<const SharedPlan>(args);
  }
  works_.push_back(attention_work(context_.kernels, args, plan_));
  return kOk;
}

Status Operations::add_rms_norm(const NormArgs& args) {
  const auto kernel = context_.kernels.rms_norm.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.hidden),
             [=](int64_t begin, int64_t end, std::byte*) { kernel(args, begin, end); });
}

Status Operations::add_layer_norm(const NormArgs& args) {
  const auto kernel = context_.kernels.layer_norm.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.hidden),
             [=](int64_t begin, int64_t end, std::byte*) { kernel(args, begin, end); });
}

Status Operations::add_silu_and_mul(const SiluArgs& args) {
  const auto kernel = context_.kernels.silu_and_mul.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.n), [=](int64_t begin, int64_t end, std::byte*) { kernel(args, begin, end); });
}

Status Operations::add_rotary(const RotaryArgs& args) {
  if (const Status status = check_tokens(args); status != kOk) return status;
  const auto kernel = context_.kernels.rotary.of[args.dtype];
  const int64_t elements = (args.query.count + 2 * args.key.count) * args.head_dim;
  return add(args.num_tokens, grain(kWorthThreads, elements),
             [=](int64_t begin, int64_t end, std::byte*) { kernel(args, begin, end); });
}

Status Operations::add_quantize(const QuantizeArgs& args) {
  const auto kernel = context_.kernels.quantize.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.n), [=](int64_t begin, int64_t end, std::byte*) { kernel(args, begin, end); });
}

Status Operations::add_product(const ProductArgs& args) {
  const auto kernel = context_.kernels.product;
  const int64_t elements = args.in_features * kPanel * (1 + args.num_tokens / 16);
  const int64_t panel_bytes = args.in_features * kPanel * static_cast<int64_t>(sizeof(uint16_t));
  return add(
      args.num_tokens > 0 ? num_panels(args) : 0, grain(kWorthReading, elements),
      [=](int64_t begin, int64_t end, std::byte* scratch) { kernel(args, begin, end, scratch); },
      args.multiplied == kCodes ? panel_bytes : 0);
}

}  // namespace quire
