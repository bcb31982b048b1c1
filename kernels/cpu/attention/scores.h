// Scores from products of query and key, and the softmax over scores that come in parts.
#pragma once

#include "runtime/api.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {

// What turns the products of one query into scores.
struct ScoreRule {
  float scale;
  float soft_cap;  // 0: none
  float slope;     // of ALiBi for this head; 0: none

  ScoreRule(const AttentionArgs& args, int64_t head)
      : scale(static_cast<float>(args.scale)),
        soft_cap(static_cast<float>(args.soft_cap)),
        slope(args.alibi_slopes == nullptr ? 0.0f : args.alibi_slopes[head]) {}

  // `distance` is the position of the key in lane 0 less that of the query.
  Vec operator()(Vec product, int64_t distance) const {
    Vec score = product * set1(scale);
    if (soft_cap != 0.0f) score = set1(soft_cap) * tanh(score / set1(soft_cap));
    if (slope != 0.0f) score = fma(set1(slope), set1(static_cast<float>(distance)) + lane_numbers(), score);
    return score;
  }
};

// The running softmax of one query: `sum` of e^(score - max_score) over the scores so far, of which `max_score` is the
// largest.
struct Softmax {
  float max_score = -kInfinity;
  float sum = 0.0f;

  // Makes room for scores up to `new_max`; returns the factor for all that was summed up before.
  float raise(float new_max) {
    const float before = max_score;
    if (!(new_max > max_score)) return 1.0f;
    max_score = new_max;
    const float factor = before == -kInfinity ? 0.0f : one_exp(before - max_score);
    sum *= factor;
    return factor;
  }

  // What scores are taken relative to: while all are -infinity, their weights are 0 and not NaN.
  float base() const { return max_score == -kInfinity ? 0.0f : max_score; }

  static float one_exp(float x) { return first_lane(exp(set1(x))); }
};

// The softmax before the first score of a row: the sink of the head, where it has one, counts as a score that was seen.
inline Softmax first_softmax(const AttentionArgs& args, int64_t head) {
  return args.sinks == nullptr ? Softmax() : Softmax{args.sinks[head], 1.0f};
}

// Products become scores, in place; those that are not seen, outside of `first` to `last` - 1, become -infinity.
// Returns the largest. `count` is a multiple of kWidth; the key of the first product is at `distance`.
template <bool kAllSeen>
inline float score_all(float* products, int count, int first, int last, const ScoreRule& rule, int64_t distance) {
  const Vec hidden = set1(-kInfinity);
  Vec largest = hidden;
  for (int i = 0; i < count; i += kWidth) {
    Vec score = rule(load(products + i), distance + i);
    if constexpr (!kAllSeen) score = keep(score, first - i, last - i, hidden);
    store(products + i, score);
    largest = max(largest, score);
  }
  return reduce_max(largest);
}

inline float score(float* products, int count, int first, int last, const ScoreRule& rule, int64_t distance) {
  return first <= 0 && last >= count ? score_all<true>(products, count, first, last, rule, distance)
                                     : score_all<false>(products, count, first, last, rule, distance);
}

// Scores become weights relative to `base`; returns their sum.
template <class Weight>
inline float weigh(const float* scores, Weight* weights, int count, float base) {
  Vec sum = zero();
  for (int i = 0; i < count; i += kWidth) {
    const Vec weight = exp(load(scores + i) - set1(base));
    sum = sum + weight;
    store(weights + i, weight);
  }
  return reduce_add(sum);
}

}  // namespace quire::QUIRE_ISA
