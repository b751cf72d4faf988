#include "cc/table/hash_table.h"

namespace dynemb {

template <class K>
void HashTable<K>::Admit(const Batch& batch, Exec& exec, BatchScratch* scratch) {
  InsertPlan* const plan = &scratch->plan;
  const size_t m = plan->size();
  if (m == 0) return;
  uint64_t* const keys = scratch->new_keys.Resize(m);
  uint32_t* const times = scratch->times.Resize(m);
  AdmissionCounters::Place* const places = scratch->places.Resize(m);
  bool* const admitted = scratch->admitted.Resize(m);
  const auto occurs = [&batch](uint32_t i) { return batch.times != nullptr ? batch.times[i] : 1; };
  exec.ParallelFor(m, kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) {
      keys[j] = batch.keys[plan->positions[j]];
      times[j] = occurs(plan->positions[j]);
    }
  });
  for (const InsertPlan::Repeat& r : plan->repeats()) {
    uint32_t* const sum = &times[plan->NumberAt(r.first)];
    *sum += std::min(occurs(r.position), ~uint32_t{0} - *sum);
  }
  if (admission_.Decide(exec, keys, times, m, places, admitted) == m) return;
  uint64_t refused = 0;
  for (size_t j = 0; j < m; ++j) refused += admitted[j] ? 0 : times[j];
  counters_.unadmitted.fetch_add(refused, std::memory_order_relaxed);
  plan->Keep(admitted);
}

template <class K>
void HashTable<K>::AdmissionCounts(KeySpan keys, uint32_t* counts) const {
  const AdmissionCounters& counters = admission_.counters();
  for (size_t i = 0; i < keys.size(); ++i) {
    counts[i] = admission_.counts() ? counters.CountOf(counters.Of(keys.As<K>()[i])) : 0;
  }
}

template <class K>
void HashTable<K>::ForgetCounts(KeySpan keys) {
  AdmissionCounters& counters = admission_.counters();
  for (size_t i = 0; admission_.counts() && i < keys.size(); ++i) {
    counters.Forget(counters.Of(keys.As<K>()[i]));
  }
}

// hash_table.cc instantiates the class without the members that only this file defines.
#define DYNEMB_INSTANTIATE(K)                                            \
  template void HashTable<K>::Admit(const Batch&, Exec&, BatchScratch*); \
  template void HashTable<K>::AdmissionCounts(KeySpan, uint32_t*) const; \
  template void HashTable<K>::ForgetCounts(KeySpan)
DYNEMB_INSTANTIATE(uint64_t);
DYNEMB_INSTANTIATE(uint32_t);
#undef DYNEMB_INSTANTIATE

}  // namespace dynemb
