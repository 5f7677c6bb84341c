// Attention of a few query rows, bound by reading keys and values.
//
// The keys are split into spans at fixed absolute positions. A span gives each query row that sees
// some of it a maximum, a sum and a weighted sum of values; a second step joins the spans in
// order. Which thread did which span, and how many rows came together, changes no bit.
#include <cmath>
#include <limits>

#include "attention.h"
#include "attention_lanes.h"
#include "pool.h"

namespace ts {
namespace {

constexpr int SPAN = 128;
constexpr int MOST_AHEAD = 32;   // rows that are prefetched before their turn
constexpr int FLOATS_AHEAD = 3072;
constexpr int64_t PARTIAL_FLOATS = 8 << 20;  // more query rows go one batch after another
constexpr int64_t PRODUCTS_WORTH_A_THREAD = 32768;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Where the rows of a span lie; indices count from the span's first position. Any index may be
// read: outside [begin, end) stand pointers to rows nearby, whose products nobody uses.
struct SpanRows {
  int begin, end;
  const float* k[SPAN + KEYS + MOST_AHEAD];
  const float* v[SPAN + KEYS + MOST_AHEAD];
};

// Partial results of one head's rows in one span.
struct Partial {
  float* top;    // [rows]
  float* total;  // [rows]
  float* out;    // [rows, stride]
};

class Decode {
 public:
  // With a choice of rows, position i stands for the cache's row chosen[i].
  Decode(const AttendPlan& plan, const float* q, float* out, const CacheRows& rows, int64_t count,
         const int32_t* chosen = nullptr)
      : plan_(plan),
        rows_(rows),
        chosen_(chosen),
        q_(q),
        out_(out),
        count_(count),
        lines_(count * plan.group()),
        stride_((plan.head_dim + LANES - 1) / LANES * LANES),
        ahead_(std::max(2 * KEYS, std::min(MOST_AHEAD, FLOATS_AHEAD / plan.head_dim))),
        begin_(plan.first_seen(rows.end - count)),
        first_span_(begin_ / SPAN),
        spans_((rows.end - 1) / SPAN + 1 - first_span_) {}

  // Floats of partial results that one call needs.
  int64_t partial_floats() const { return plan_.kv_heads * spans_ * lines_ * (stride_ + 2); }

  void run() {
    const int64_t tasks = plan_.kv_heads * spans_, lines = plan_.kv_heads * lines_;
    const int64_t products = (rows_.end - begin_) * plan_.q_heads * count_ * plan_.head_dim;
    const int64_t most = products < PRODUCTS_WORTH_A_THREAD ? 1 : plan_.threads;
    const int threads = static_cast<int>(std::min(most, tasks));
    Carver sizes(nullptr);
    carve(sizes, threads - 1);
    cooperate(threads, sizes.bytes(), [&](Crew& crew) {
      Carver carver(crew.scratch);
      const Scratch scratch = carve(carver, crew.thread);
      crew.share(tasks, crew.block(tasks, 1, tasks), [&](int64_t begin, int64_t end) {
        attend_spans(begin, end, scratch);
      });
      crew.share(lines, crew.block(lines, 1, lines), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) join_spans(i, scratch);
      });
    });
  }

 private:
  struct Scratch {
    float* partials;  // of all tasks, shared by the threads
    float* weights;   // [lines, SPAN], a thread's own
  };

  Scratch carve(Carver& carver, int thread) const {
    Scratch scratch{carver.take<float>(partial_floats()), nullptr};
    for (int i = 0; i <= thread; i++) scratch.weights = carver.take<float>(lines_ * SPAN);
    return scratch;
  }

  int64_t span_start(int64_t task) const { return (first_span_ + task % spans_) * SPAN; }

  void find_span(int64_t task, SpanRows& span) const {
    const int64_t start = span_start(task);
    span.begin = static_cast<int>(std::max<int64_t>(0, begin_ - start));
    span.end = static_cast<int>(std::min<int64_t>(SPAN, rows_.end - start));
    const int head = static_cast<int>(task / spans_);
    const int64_t first = start + span.begin, last = start + span.end;
    const float **k = span.k + span.begin, **v = span.v + span.begin;
    if (chosen_ != nullptr)
      find_chosen(rows_, chosen_, head, plan_.head_dim, first, last, k, v);
    else
      find_rows(rows_, head, plan_.head_dim, first, last, k, v);
    for (int i = 0; i < span.begin; i++) {
      span.k[i] = span.k[span.begin];
      span.v[i] = span.v[span.begin];
    }
    for (int i = span.end; i < SPAN + KEYS + MOST_AHEAD; i++) {
      span.k[i] = span.k[span.end - 1];
      span.v[i] = span.v[span.end - 1];
    }
  }

  Partial partial(const Scratch& scratch, int64_t task) const {
    float* start = scratch.partials + task * lines_ * (stride_ + 2);
    return {start + lines_ * stride_, start + lines_ * (stride_ + 1), start};
  }

  int64_t position(int64_t line) const { return rows_.end - count_ + line / plan_.group(); }

  // Line i of a head is query row i / group, head i % group of those that share the keys.
  int64_t query_at(int64_t head, int64_t line) const {
    const int64_t group = plan_.group();
    return (line / group * plan_.q_heads + head * group + line % group) * plan_.head_dim;
  }

  void attend_spans(int64_t begin, int64_t end, const Scratch& scratch) const {
    SpanRows spans[2];
    find_span(begin, spans[0]);
    for (int64_t task = begin; task < end; task++) {
      SpanRows &span = spans[(task - begin) % 2], &next = spans[(task - begin + 1) % 2];
      const bool last = task + 1 == plan_.kv_heads * spans_;  // another piece follows on this one
      if (!last) find_span(task + 1, next);
      attend_span(task, span, last ? span : next, scratch);
    }
  }

  // What a first pass over keys or values reads, the memory has been asked for some rows before;
  // a further pass finds them in the cache and asks for what comes next.
  void attend_span(int64_t task, SpanRows& span, const SpanRows& next,
                   const Scratch& scratch) const {
    const int64_t head = task / spans_;
    const Partial part = partial(scratch, task);
    float* weights = scratch.weights;
    for (int i = 0; i < ahead_; i++) {
      span.k[span.end + KEYS + i] = span.v[std::min(span.begin + i, SPAN)];
      span.v[span.end + i] = next.k[std::min(next.begin + i, SPAN)];
    }
    in_groups([&](int64_t line, auto queries) {
      const float* const* fetch = line == 0 ? span.k + ahead_ : span.v;
      const float* q[queries.value];
      for (int n = 0; n < queries.value; n++) q[n] = q_ + query_at(head, line + n);
      float* scores = weights + line * SPAN;
      for (int j = span.begin / KEYS * KEYS; j < span.end; j += KEYS)
        score_keys<queries.value>(q, span.k + j, fetch + j, plan_.head_dim, scores + j, SPAN);
    });
    for (int64_t line = 0; line < lines_; line++) weigh(line, span_start(task), weights, part);
    memset(part.out, 0, lines_ * stride_ * sizeof(float));
    in_groups([&](int64_t line, auto queries) {
      const float* const* fetch = line == 0 ? span.v + ahead_ : next.k;
      add_values<queries.value>(span, fetch, weights + line * SPAN, part.out + line * stride_);
    });
  }

  template <int N>
  struct Queries {
    static constexpr int value = N;
  };

  template <class Function>
  void in_groups(Function&& function) const {
    int64_t line = 0;
    for (; line + QUERIES <= lines_; line += QUERIES) function(line, Queries<QUERIES>{});
    switch (lines_ - line) {
      case 3: return function(line, Queries<3>{});
      case 2: return function(line, Queries<2>{});
      case 1: return function(line, Queries<1>{});
    }
  }

  // Scores of a line become weights, zero where the line does not see the key.
  void weigh(int64_t line, int64_t start, float* weights, const Partial& part) const {
    float* w = weights + line * SPAN;
    const int64_t at = position(line);
    const int begin = static_cast<int>(std::max<int64_t>(0, plan_.first_seen(at) - start));
    const int end = static_cast<int>(std::min<int64_t>(SPAN, at + 1 - start));
    if (begin >= end) {
      memset(w, 0, SPAN * sizeof(float));
      part.top[line] = LOWEST;
      part.total[line] = 0.0f;
      return;
    }
    int32_t lane[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = i;
    I index;
    memcpy(&index, lane, sizeof index);

    F top = splat(LOWEST), total{};
    for (int i = 0; i < SPAN; i += LANES) {
      const I seen = (index + i >= begin) & (index + i < end);
      const F score = select(seen, load(w + i) * plan_.scale, splat(LOWEST));
      store(w + i, score);
      top = larger(top, score);
    }
    const float highest = largest(top);
    for (int i = 0; i < SPAN; i += LANES) {
      const I seen = (index + i >= begin) & (index + i < end);
      const F weight = select(seen, exponential(load(w + i) - highest), F{});
      store(w + i, weight);
      total = total + weight;
    }
    part.top[line] = highest;
    part.total[line] = sum(total);
  }

  template <int N>
  void add_values(const SpanRows& span, const float* const* fetch, const float* weights,
                  float* out) const {
    const int D = plan_.head_dim;
    int j = span.begin;
    for (; j + KEYS <= span.end; j += KEYS)
      add_rows<N, KEYS>(span.v + j, fetch + j, weights + j, SPAN, D, out, stride_);
    for (; j < span.end; j++)
      add_rows<N, 1>(span.v + j, fetch + j, weights + j, SPAN, D, out, stride_);
  }

  void join_spans(int64_t index, const Scratch& scratch) const {
    const int64_t head = index / lines_, line = index % lines_, at = position(line);
    const int64_t first = plan_.first_seen(at) / SPAN - first_span_;
    const int64_t last = at / SPAN - first_span_;
    const float* sink = plan_.sinks;
    if (sink != nullptr) sink += head * plan_.group() + line % plan_.group();

    float top = sink != nullptr ? *sink : LOWEST;
    for (int64_t s = first; s <= last; s++)
      top = std::max(top, partial(scratch, head * spans_ + s).top[line]);
    float* out = out_ + query_at(head, line);
    const int D = plan_.head_dim;
    float total = sink != nullptr ? std::exp(*sink - top) : 0.0f;
    for (int64_t s = first; s <= last; s++) {
      const Partial part = partial(scratch, head * spans_ + s);
      const float factor = std::exp(part.top[line] - top);
      total += part.total[line] * factor;
      const float* values = part.out + line * stride_;
      for (int i = 0; i < D; i += LANES) {
        const int some = std::min(LANES, D - i);
        const F before = s == first ? F{} : load_first(out + i, some);
        store_first(out + i, fma(load(values + i), splat(factor), before), some);
      }
    }
    const F inverse = splat(1.0f / total);
    for (int i = 0; i < D; i += LANES) {
      const int some = std::min(LANES, D - i);
      store_first(out + i, load_first(out + i, some) * inverse, some);
    }
  }

  const AttendPlan& plan_;
  const CacheRows& rows_;
  const int32_t* chosen_;
  const float* q_;
  float* out_;
  const int64_t count_, lines_, stride_;
  const int ahead_;
  const int64_t begin_, first_span_, spans_;
};

}  // namespace
}  // namespace ts

extern "C" void ts_attend_decode(const ts::AttendPlan* plan, const ts::AttendCall* call) {
  using namespace ts;
  const int64_t width = static_cast<int64_t>(plan->q_heads) * plan->head_dim;
  const int64_t start = call->rows.end - call->count;
  const int64_t one = Decode(*plan, call->q, call->out, call->rows, 1).partial_floats();
  const int64_t together = std::max<int64_t>(1, PARTIAL_FLOATS / one);
  CacheRows upto = call->rows;
  for (int64_t done = 0; done < call->count; done = upto.end - start) {
    upto.end = std::min(start + done + together, call->rows.end);
    const int64_t at = done * width, some = upto.end - start - done;
    Decode(*plan, call->q + at, call->out + at, upto, some).run();
  }
}

extern "C" void ts_attend_chosen(const ts::AttendPlan* plan, const ts::ChosenCall* call) {
  using namespace ts;
  const int64_t width = static_cast<int64_t>(plan->q_heads) * plan->head_dim;
  CacheRows seen = call->rows;
  for (int64_t i = 0; i < call->count; i++) {
    seen.end = call->lengths[i];
    Decode(*plan, call->q + i * width, call->out + i * width, seen, 1,
           call->positions + i * call->most)
        .run();
  }
}
