// LockstepLanes: a warp emulated by W lanes in lock-step. It runs the many-lane path of
// bucket_ops.h, also under sanitizers, on hosts without a GPU. Slow; for tests.
//
// A collective writes this lane's word, waits for the team at a barrier, and reads the words of the
// other lanes. Two buffers alternate. A lane overwrites a buffer only two collectives later; by
// then every lane has passed the barrier in between, and has therefore read the buffer.
#ifndef DYNEMB_TESTS_LANES_LOCKSTEP_H_
#define DYNEMB_TESTS_LANES_LOCKSTEP_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "cc/table/bucket.h"
#include "cc/table/exec.h"
#include "tests/simulated/lane_turns.h"

namespace dynemb {

// A team has W lanes, which take turns (LaneTurns). kTeams teams work concurrently, so that they
// contend for buckets.
template <uint32_t W>
class LockstepLanes : public SharedHead<LockstepLanes<W>> {
 public:
  static constexpr bool kShared = true;
  static constexpr uint32_t kTeams = 2;
  using Head = SharedHead<LockstepLanes<W>>;

  uint32_t rank() const { return rank_; }
  static constexpr uint32_t width() { return W; }

  uint32_t Match(const Bucket& bucket, uint8_t digest) {
    return Mask([&](uint32_t s) { return Head::Digest(bucket, s) == digest; });
  }
  // Tests the row id, which a claim swaps first; it stores the digest later.
  uint32_t Empty(const Bucket& bucket) {
    return Mask([&](uint32_t s) { return Load(&bucket.row[s]) == kNoRow; });
  }
  template <class Pred>
  uint32_t Mask(Pred pred) {
    uint64_t mine = 0;
    for (uint32_t s = rank_; s < kSlotsPerBucket; s += W) mine |= (pred(s) ? 1ull : 0ull) << s;
    uint64_t all = 0;
    for (uint64_t word : Exchange(mine)) all |= word;
    return static_cast<uint32_t>(all);
  }
  template <class Value>
  uint64_t Min(Value value) {
    uint64_t least = ~0ull;
    for (uint32_t s = rank_; s < kSlotsPerBucket; s += W) {
      const uint64_t v = value(s);
      least = v < least ? v : least;
    }
    for (uint64_t word : Exchange(least)) least = word < least ? word : least;
    return least;
  }
  template <class T>
  T FromLeader(T value) {
    return FromRank(value, 0);
  }
  template <class T>
  T FromRank(T value, uint32_t rank) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t word = 0;
    memcpy(&word, &value, sizeof(value));
    word = Exchange(word)[rank];
    memcpy(&value, &word, sizeof(value));
    return value;
  }
  uint32_t Max(uint32_t value) {
    for (uint64_t word : Exchange(value))
      value = word > value ? static_cast<uint32_t>(word) : value;
    return value;
  }

  template <class T>
  static T Load(const T* p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
  }
  template <class T>
  static void Store(T* p, T value) {
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
  }
  static uint32_t CompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
    __atomic_compare_exchange_n(p, &expected, desired, /*weak=*/false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
    return expected;
  }
  static void Xor(uint32_t* p, uint32_t bits) { __atomic_fetch_xor(p, bits, __ATOMIC_RELAXED); }

  // `exec` is not used: both teams must make progress, which an Exec does not promise.
  template <class Body>
  static void Launch(Exec& /*exec*/, size_t n, size_t grain, const Body& body) {
    const size_t ranges = (n + grain - 1) / grain;
    const auto teams = static_cast<uint32_t>(ranges < kTeams ? ranges : kTeams);
    std::atomic<size_t> next_range{0};
    std::atomic<uint32_t> ready{0};
    const auto run_team = [&] {
      // Otherwise a team would often end before the other one has begun.
      for (++ready; ready < teams;) std::this_thread::yield();
      Team team;
      team.turns.Run(W, [&](uint32_t rank) {
        LockstepLanes lanes(&team, rank);
        for (;;) {
          size_t begin = rank == 0 ? next_range.fetch_add(grain) : 0;
          begin = lanes.FromLeader(begin);
          if (begin >= n) return;
          body(lanes, begin, begin + grain < n ? begin + grain : n);
        }
      });
    };
    std::vector<std::thread> others;
    for (uint32_t t = 1; t < teams; ++t) others.emplace_back(run_team);
    run_team();
    for (std::thread& thread : others) thread.join();
  }

 private:
  struct Words {
    uint64_t word[W];
    uint64_t operator[](size_t i) const { return word[i]; }
    const uint64_t* begin() const { return word; }
    const uint64_t* end() const { return word + W; }
  };
  struct Team {
    std::atomic<uint64_t> words[2][W];
    std::atomic<uint64_t> arrived{0};
    LaneTurns turns;
  };

  LockstepLanes(Team* team, uint32_t rank) : team_(team), rank_(rank) {}

  Words Exchange(uint64_t mine) {
    auto& buffer = team_->words[collective_ & 1];
    buffer[rank_].store(mine, std::memory_order_relaxed);
    ++collective_;
    // acq_rel: all writes of a lane before the barrier are visible to the team after it.
    team_->arrived.fetch_add(1, std::memory_order_acq_rel);
    while (team_->arrived.load(std::memory_order_acquire) < collective_ * W) {
      team_->turns.Yield();
    }
    Words all;
    for (uint32_t i = 0; i < W; ++i) all.word[i] = buffer[i].load(std::memory_order_relaxed);
    return all;
  }

  Team* team_;
  uint32_t rank_;
  uint64_t collective_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_LANES_LOCKSTEP_H_
