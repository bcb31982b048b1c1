// How scores are made of products of query and key, and the softmax over them as they come.
#pragma once

#include "api.h"
#include "vec.h"

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

// The running softmax of one query: `sum` of e^(score - most) over the scores so far, of which `most` is the largest.
struct Softmax {
  float most = -kInfinity;
  float sum = 0.0f;

  // Makes room for scores up to `most_new`; returns the factor for all that was summed up before.
  float raise(float most_new) {
    const float before = most;
    if (!(most_new > most)) return 1.0f;
    most = most_new;
    const float factor = before == -kInfinity ? 0.0f : one_exp(before - most);
    sum *= factor;
    return factor;
  }

  // What scores are taken relative to: while all are -infinity, their weights are 0 and not NaN.
  float base() const { return most == -kInfinity ? 0.0f : most; }

  static float one_exp(float x) { return first_lane(exp(set1(x))); }
};

// The softmax before the first score of a row: the sink of the head, where it has one, counts as a score that was seen.
inline Softmax first_softmax(const AttentionArgs& args, int64_t head) {
  return args.sinks == nullptr ? Softmax() : Softmax{args.sinks[head], 1.0f};
}

// Products become scores, in place; those that are not seen, outside of `first` to `last` - 1, become -infinity. Returns
// the largest. `count` is a multiple of kWidth; the key of the first product is at `distance`.
template <bool kAllSeen>
inline float score_all(float* products, int count, int first, int last, const ScoreRule& rule, int64_t distance) {
  const Vec hidden = set1(-kInfinity);
  Vec most = hidden;
  for (int i = 0; i < count; i += kWidth) {
    Vec score = rule(load(products + i), distance + i);
    if constexpr (!kAllSeen) score = keep(score, first - i, last - i, hidden);
    store(products + i, score);
    most = max(most, score);
  }
  return reduce_max(most);
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
