// Norms and rotates the heads of attention_partials and attention_tensor, in front of the first pass:
// a threadgroup's queries, and with WRITES the step's own keys and values where they lie in its
// chunk. Those go to own_rows, and the first tile of queries writes them into the new tail.
//
// A SIMD-group takes neighbouring items, at_once of them at a time, whose numbers are on their way
// together: queries first, then key and value of each row in turn. The body has group of groups,
// queries, at_once, own_rows, and PUT_QUERY, which keeps number d of an item's head.
const int items = high > start ? queries + OWN : queries;
const int items_a_group = (items + groups - 1) / groups;
const int last_item = metal::min(items, (group + 1) * items_a_group);
Floats<SIZE> q_factor = head_ones<SIZE>();
if (Q_NORM == 2) {
  q_factor = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(q_weight, lane);
}
#ifdef WRITES
Floats<SIZE> k_factor = head_ones<SIZE>();
if (K_NORM == 2) {
  k_factor = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(k_weight, lane);
}
#endif
int turned_row = -1;
Floats<2 * TURNS> turns;
for (int next = group * items_a_group; next < last_item; next += at_once) {
  Floats<SIZE> number[at_once];
  UNROLL for (int b = 0; b < at_once; b++) {
    const int item = metal::min(next + b, last_item - 1);
    const int i = metal::min(first_query + item, M * SHARE - 1);
    const GLOBAL T* from = query_rows + i / SHARE * static_cast<int>(query_rows_strides[0]) +
                           (kv_head * SHARE + i % SHARE) * Q_STEP;
#ifdef WRITES
    const int own = item - queries;
    if (own >= 0) {
      from = own % 2 == 0 ? key_rows + own / 2 * static_cast<int>(key_rows_strides[0])
                          : value_rows + own / 2 * static_cast<int>(value_rows_strides[0]);
      from += kv_head * D;
    }
#endif
    number[b] = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(from, lane);
  }
  UNROLL for (int b = 0; b < at_once; b++) {
    const int item = next + b;
    const bool is_query = item < queries;
    const bool is_value = !is_query && (item - queries) % 2 == 1;
    const int row = is_query ? (first_query + item) / SHARE : (item - queries) / 2;
    if (item < last_item && !is_value && row != turned_row) {
      const float position = static_cast<float>(start + row);
      turns = head_turns<PAIRS, TURNS>(position, frequencies, numbers[3], lane);
      turned_row = row;
    }
    if (item < last_item && is_query) {
      if (Q_NORM != 0) {
        number[b] = normed_head<D>(number[b], q_factor, numbers[0]);
      }
      number[b] = rotated_head<TURNS>(number[b], turns);
      UNROLL for (int j = 0; j < SIZE; j++) {
        const int d = head_place<D, PAIRS, IS_TRADITIONAL>(j, lane);
        if (d < D) {
          PUT_QUERY(item, d, static_cast<T>(number[b].v[j]));
        }
      }
    }
#ifdef WRITES
    if (item < last_item && !is_query) {
      const bool is_normed = is_value ? V_NORM != 0 : K_NORM != 0;
      if (is_normed) {
        const Floats<SIZE> factor = is_value ? head_ones<SIZE>() : k_factor;
        number[b] = normed_head<D>(number[b], factor, numbers[is_value ? 2 : 1]);
      }
      if (!is_value) {
        number[b] = rotated_head<TURNS>(number[b], turns);
      }
      const int position = start + row;
      const bool is_written = first_query == 0 && position >= chunk && position < high;
      UNROLL for (int j = 0; j < SIZE; j++) {
        const int d = head_place<D, PAIRS, IS_TRADITIONAL>(j, lane);
        const int to = (tail_from + position - boundary) * D + d;
        if (d < D) {
          own_rows[((is_value ? M : 0) + row) * D + d] = static_cast<KV>(number[b].v[j]);
        }
        if (d < D && is_written && !is_value) {
          new_k[to] = static_cast<KV>(number[b].v[j]);
        }
        if (d < D && is_written && is_value) {
          new_v[to] = static_cast<KV>(number[b].v[j]);
        }
      }
    }
#endif
  }
}
