// From the logits of a row to a token: the highest logit, scores and their weights, the lowest score that top-k, top-p
// and min-p keep, and the inverse of the cumulative distribution. worker_svc/sampling explains each of them.
//
// A threshold is found without sorting the vocabulary: one pass sums at several scores and finds the two scores between
// which the threshold lies; the next pass reads only the scores between them. Sums are of floats within a line, of
// doubles from line to line.
#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kLine = 256;
// So short a list is sorted.
constexpr int64_t kSorted = 48;
// Scores at which one pass sums; the first is the lowest that can be the threshold.
constexpr int kPlaces = 8;
// `exp` of lower numbers is 0.
constexpr float kLowest = -88.0f;

// Tokens in any order. There is room for kWidth more after the last one.
struct Candidates {
  float* scores;
  float* weights;
  int64_t size;

  // No lane behind the last candidate is above any threshold.
  void close() const {
    store(scores + size, set1(-kInfinity));
    store(weights + size, zero());
  }
};

// For each place the sum of the weights, or the number, of the candidates at or above it.
template <bool kCounts>
void sum_at(const Candidates& list, const float (&places)[kPlaces], double (&sums)[kPlaces]) {
  Vec at[kPlaces];
  for (int i = 0; i < kPlaces; ++i) at[i] = set1(places[i]);
  for (double& sum : sums) sum = 0;
  for (int64_t begin = 0; begin < list.size; begin += kLine) {
    Vec parts[kPlaces];
    for (Vec& part : parts) part = zero();
    for (int64_t i = begin; i < begin + kLine && i < list.size; i += kWidth) {
      const Vec score = load(list.scores + i), value = kCounts ? set1(1.0f) : load(list.weights + i);
      for (int j = 0; j < kPlaces; ++j) parts[j] = parts[j] + zero_below(value, score, at[j]);
    }
    float line[kPlaces];
    for (int j = 0; j < kPlaces; j += 4) reduce_add4(parts + j, line + j);
    for (int j = 0; j < kPlaces; ++j) sums[j] += static_cast<double>(line[j]);
  }
}

// Copies the candidates with low <= score < high, to the front of `to`, which may be the same list.
Candidates between(const Candidates& list, float low, float high, const Candidates& to) {
  Candidates kept{to.scores, to.weights, 0};
  for (int64_t i = 0; i < list.size; i += kWidth) {
    const Vec score = load(list.scores + i), weight = load(list.weights + i);
    kept.size += store_between(kept.scores + kept.size, kept.weights + kept.size, score, weight, low, high);
  }
  kept.close();
  return kept;
}

void sort_descending(const Candidates& list) {
  for (int64_t i = 1; i < list.size; ++i) {
    const float score = list.scores[i], weight = list.weights[i];
    int64_t place = i;
    for (; place > 0 && list.scores[place - 1] < score; --place) {
      list.scores[place] = list.scores[place - 1];
      list.weights[place] = list.weights[place - 1];
    }
    list.scores[place] = score;
    list.weights[place] = weight;
  }
}

// Scores from `low` on and below `high`; false where there is none between them. No score is above 0, and most of the
// weight is near it, so the first places are at halves.
bool spread(float low, float high, float (&places)[kPlaces]) {
  bool has_inner = false;
  places[0] = low;
  for (int i = 1; i < kPlaces; ++i) {
    places[i] = high == kInfinity ? places[i - 1] / 2 : low + (high - low) * (static_cast<float>(i) / kPlaces);
    has_inner = has_inner || (places[i] > low && places[i] < high);
  }
  return has_inner;
}

// The highest score such that the candidates at or above it weigh, or count, `wanted` or more; `low` if all candidates
// from `low` on are less. `rest` is memory for the same number of candidates.
template <bool kCounts>
float threshold(Candidates list, double wanted, float low, const Candidates& rest) {
  float high = kInfinity;
  double above = 0;  // the sum of the weights at `high` and higher
  while (list.size > kSorted) {
    float places[kPlaces];
    if (!spread(low, high, places)) return low;
    double sums[kPlaces];
    sum_at<kCounts>(list, places, sums);
    if (above + sums[0] < wanted) return low;
    int last = kPlaces - 1;
    while (last > 0 && above + sums[last] < wanted) --last;
    if (last + 1 < kPlaces) {
      above += sums[last + 1];
      high = places[last + 1];
    }
    low = places[last];
    list = between(list, low, high, rest);
  }
  sort_descending(list);
  for (int64_t i = 0; i < list.size; ++i) {
    if (list.scores[i] < low) break;
    above += kCounts ? 1.0 : static_cast<double>(list.weights[i]);
    if (above >= wanted) return list.scores[i];
  }
  return low;
}

// The weight of the k most likely candidates; `last` is the lowest of their scores.
double weight_of_likeliest(const Candidates& list, int64_t k, float last) {
  double sum = 0, tied = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    if (list.scores[i] > last) {
      sum += static_cast<double>(list.weights[i]);
      ++count;
    } else {
      tied = static_cast<double>(list.weights[i]);
    }
  }
  return sum + tied * static_cast<double>(k - count);
}

// The scratch memory of one row.
struct Memory {
  Memory(std::byte* memory, int64_t vocab_size) {
    Arena arena(memory);
    const int64_t size = padded(vocab_size, kLine), room = size + kLine;
    all = {arena.take<float>(room), arena.take<float>(room), size};
    some = {arena.take<float>(room), arena.take<float>(room), 0};
    sums = arena.take<double>(size / kLine);
    bytes = arena.used();
  }

  Candidates all, some;
  double* sums;  // of each line
  int64_t bytes;
};

class Row {
 public:
  Row(const DrawArgs& args, int64_t row, const Memory& memory)
      : args_(args),
        row_(row),
        logits_(args.logits + row * args.row_stride),
        all_(memory.all),
        some_(memory.some),
        sums_(memory.sums) {}

  void draw() {
    const float highest = find_highest();
    args_.highest[row_] = highest;
    args_.token_ids[row_] = 0;
    if (!(highest > -kInfinity)) return;  // NaN too
    const int64_t greedy = first_with(highest);
    args_.token_ids[row_] = greedy;
    if (!(args_.temperature[row_] > 0)) return;
    weigh(highest);
    const int64_t drawn = pick(lowest_kept());
    args_.token_ids[row_] = drawn < 0 ? greedy : drawn;
  }

 private:
  int64_t lines() const { return all_.size / kLine; }

  Vec logits_at(int64_t i) const {
    const int64_t count = args_.vocab_size - i;
    if (count >= kWidth) return load(logits_ + i);
    if (count <= 0) return set1(-kInfinity);
    return keep(load(logits_ + i, static_cast<int>(count)), 0, static_cast<int>(count), set1(-kInfinity));
  }

  // NaN where a logit is NaN or infinite. The maximum of each line stays in sums_.
  float find_highest() {
    Vec unusable = zero();
    float highest = -kInfinity;
    for (int64_t line = 0; line < lines(); ++line) {
      Vec largest = set1(-kInfinity);
      for (int64_t i = line * kLine; i < (line + 1) * kLine; i += kWidth) {
        const Vec x = logits_at(i);
        largest = max(largest, x);
        unusable = unusable + zero_below(set1(1.0f), x, set1(kInfinity));
      }
      const float of_line = reduce_max(largest);
      sums_[line] = static_cast<double>(of_line);
      highest = of_line > highest ? of_line : highest;
    }
    return reduce_add(unusable) != 0.0f ? std::numeric_limits<float>::quiet_NaN() : highest;
  }

  int64_t first_with(float highest) const {
    int64_t token = 0;
    while (sums_[token / kLine] != static_cast<double>(highest)) token += kLine;
    while (logits_[token] != highest) ++token;
    return token;
  }

  // Scores are logits over temperature, shifted first, so that no small temperature overflows.
  void weigh(float highest) {
    const Vec shift = set1(highest), temperature = set1(args_.temperature[row_]);
    for (int64_t line = 0; line < lines(); ++line) {
      Vec sum = zero();
      for (int64_t i = line * kLine; i < (line + 1) * kLine; i += kWidth) {
        const Vec score = (logits_at(i) - shift) / temperature, weight = exp(score);
        store(all_.scores + i, score);
        store(all_.weights + i, weight);
        sum = sum + weight;
      }
      sums_[line] = static_cast<double>(reduce_add(sum));
    }
  }

  float lowest_kept() {
    const float floor = args_.min_score[row_];
    const int64_t top_k = args_.top_k[row_];
    const double top_p = args_.top_p[row_];
    const bool has_top_k = top_k > 0 && top_k < args_.vocab_size;
    if (!has_top_k && top_p >= 1) return floor;
    const float low = floor > kLowest ? floor : kLowest;
    if (!has_top_k) return threshold<false>(all_, top_p * weight_from(floor), low, some_);
    const float last = threshold<true>(all_, static_cast<double>(top_k), low, some_);
    if (top_p >= 1) return last;
    const Candidates best = between(all_, last, kInfinity, some_);
    const int64_t count = best.size < top_k ? best.size : top_k;
    return threshold<false>(best, top_p * weight_of_likeliest(best, count, last), last, best);
  }

  double weight_from(float floor) const {
    double total = 0;
    if (!(floor > kLowest)) {
      for (int64_t line = 0; line < lines(); ++line) total += sums_[line];
      return total;
    }
    const float places[kPlaces] = {floor, floor, floor, floor, floor, floor, floor, floor};
    double sums[kPlaces];
    sum_at<false>(all_, places, sums);
    return sums[0];
  }

  // The first token at which the sum of kept weights passes its share of all; -1 if rounding hides it.
  int64_t pick(float floor) {
    double total = 0;
    if (floor > -kInfinity) keep_from(floor);
    for (int64_t line = 0; line < lines(); ++line) total += sums_[line];
    const double wanted = args_.numbers[row_] * total;
    int64_t line = -1;
    double before = 0, passed = 0;
    for (int64_t i = 0; i < lines(); ++i) {
      if (sums_[i] <= 0) continue;
      line = i;
      before = passed;
      passed += sums_[i];
      if (passed > wanted) break;
    }
    int64_t token = -1;
    double sum = 0;
    const double rest = wanted > before ? wanted - before : 0;
    for (int64_t i = line * kLine; line >= 0 && i < (line + 1) * kLine; ++i) {
      if (!(all_.scores[i] >= floor) || !(all_.weights[i] > 0)) continue;
      token = i;
      sum += static_cast<double>(all_.weights[i]);
      if (sum > rest) break;
    }
    return token;
  }

  void keep_from(float floor) {
    const Vec at = set1(floor);
    for (int64_t line = 0; line < lines(); ++line) {
      Vec sum = zero();
      for (int64_t i = line * kLine; i < (line + 1) * kLine; i += kWidth)
        sum = sum + zero_below(load(all_.weights + i), load(all_.scores + i), at);
      sums_[line] = static_cast<double>(reduce_add(sum));
    }
  }

  const DrawArgs& args_;
  const int64_t row_;
  const float* const logits_;
  const Candidates all_, some_;
  double* const sums_;  // of each line
};

}  // namespace

void draw(const DrawArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
  const Memory memory(scratch, args.vocab_size);
  for (int64_t row = begin; row < end; ++row) Row(args, row, memory).draw();
}

int64_t draw_scratch(const DrawArgs& args) { return Memory(nullptr, args.vocab_size).bytes; }

}  // namespace quire::QUIRE_ISA
