// ThreadLane: one thread per key, while other threads change the same buckets. On a GPU, a warp
// then has 32 probes in flight, whereas tiles of eight threads (lanes_cuda.cuh) have four. A probe
// reads little and waits long, so the number of probes in flight determines the speed. On the host,
// this is the fastest way to simulate a device.
#ifndef DYNEMB_DEVICE_THREAD_LANE_H_
#define DYNEMB_DEVICE_THREAD_LANE_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/table/bucket.h"
#include "cc/table/exec.h"
#include "cc/table/portability.h"

namespace dynemb {

class ThreadLane : public SharedHead<ThreadLane> {
 public:
  static constexpr bool kShared = true;
  static constexpr DYNEMB_HD uint32_t rank() { return 0; }
  static constexpr DYNEMB_HD uint32_t width() { return 1; }

  static DYNEMB_HD uint32_t Match(const Bucket& bucket, uint8_t digest) {
    const device::Words words = device::AtomicLoadPair(bucket.head);
    uint32_t mask = 0;
#if defined(__CUDA_ARCH__)
    const uint32_t want = 0x01010101u * digest;
    const uint32_t low = __vcmpeq4(words.first, want) & 0x01010101u;
    const uint32_t high = __vcmpeq4(words.second, want) & 0x00010101u;
    // The multiplication gathers the lowest bits of four bytes.
    mask = ((low * 0x01020408u) >> 24 & 0xFu) | ((high * 0x01020408u) >> 24 & 0xFu) << 4;
#else
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      const uint8_t has = ByteOf(s < 4 ? words.first : words.second, s);
      mask |= (has == digest ? 1u : 0u) << s;
    }
#endif
    return mask;
  }
  // Tests the row id, which a claim swaps first; it stores the digest later.
  static DYNEMB_HD uint32_t Empty(const Bucket& bucket) {
    const device::FourWords third = Quarter(bucket, 2), fourth = Quarter(bucket, 3);
    return Mask([&](uint32_t s) { return (s < 3 ? third.at[s + 1] : fourth.at[s - 3]) == kNoRow; });
  }
  // A bucket that is read at once, by four loads: the thread waits for memory once, not for each
  // field.
  struct SeenAtOnce {
    device::FourWords quarters[4];

    DYNEMB_HD uint32_t Word(uint32_t w) const { return quarters[w / 4].at[w % 4]; }
    DYNEMB_HD Score score(uint32_t slot) const { return Word(Bucket::kHeadWords + slot); }
    DYNEMB_HD RowId row(uint32_t slot) const {
      return Word(Bucket::kHeadWords + kSlotsPerBucket + slot);
    }
    DYNEMB_HD uint32_t Empty(ThreadLane&) const {
      return Mask([this](uint32_t s) { return row(s) == kNoRow; });
    }
  };
  static DYNEMB_HD SeenAtOnce Seen(const Bucket& bucket) {
    SeenAtOnce seen;
    for (uint32_t q = 0; q < 4; ++q) seen.quarters[q] = Quarter(bucket, q);
    return seen;
  }
  template <class Pred>
  static DYNEMB_HD uint32_t Mask(Pred pred) {
    uint32_t mask = 0;
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) mask |= (pred(s) ? 1u : 0u) << s;
    return mask;
  }
  template <class Value>
  static DYNEMB_HD uint64_t Min(Value value) {
    uint64_t least = value(0);
    for (uint32_t s = 1; s < kSlotsPerBucket; ++s) {
      const uint64_t v = value(s);
      least = v < least ? v : least;
    }
    return least;
  }
  template <class T>
  static DYNEMB_HD T FromLeader(T value) {
    return value;
  }
  template <class T>
  static DYNEMB_HD T FromRank(T value, uint32_t) {
    return value;
  }
  static DYNEMB_HD uint32_t Max(uint32_t value) { return value; }

  template <class T>
  static DYNEMB_HD T Load(const T* p) {
    return device::AtomicLoad(p);
  }
  template <class T>
  static DYNEMB_HD void Store(T* p, T value) {
    device::AtomicStore(p, value);
  }
  static DYNEMB_HD uint32_t CompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
    return device::AtomicCompareExchange(p, expected, desired);
  }
  static DYNEMB_HD void Xor(uint32_t* p, uint32_t bits) { device::AtomicXor(p, bits); }

  template <class Body>
  static void Launch(Exec& exec, size_t n, size_t grain, const Body& body) {
    exec.ParallelFor(n, grain, [&body](size_t begin, size_t end) {
      ThreadLane lane;
      body(lane, begin, end);
    });
  }

 private:
  static DYNEMB_HD device::FourWords Quarter(const Bucket& bucket, uint32_t q) {
    static_assert(Bucket::kHeadWords + kSlotsPerBucket == 9,
                  "the second word of the third quarter");
    return device::AtomicLoadFour(reinterpret_cast<const uint32_t*>(&bucket) + 4 * q);
  }
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_THREAD_LANE_H_
