// Counters of the keys and bytes that this process has sent to other ranks, per table. stats()
// reads them.
#ifndef DYNEMB_TF_EXCHANGE_COUNTERS_H_
#define DYNEMB_TF_EXCHANGE_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <string>

namespace dynemb {

struct ExchangeCounters {
  std::atomic<int64_t> keys{0};            // requested from other ranks
  std::atomic<int64_t> key_bytes{0};       // of these requests
  std::atomic<int64_t> vector_bytes{0};    // of vectors, to the ranks that requested them
  std::atomic<int64_t> gradient_bytes{0};  // of gradients, to the ranks that hold the rows
  std::atomic<int64_t> other_bytes{0};     // of assign, scatter_add and similar calls

  // The counters of the table with this name. They are never destroyed.
  static ExchangeCounters* Of(const std::string& table);
};

}  // namespace dynemb

#endif  // DYNEMB_TF_EXCHANGE_COUNTERS_H_
