// The lines of admission counters (admission.h), in host and device code.
//
//   line    64 bytes: 23 entries of 22 bits, entry e in bits [22 e, 22 e + 22) of the line as a
//           little-endian number, the entry that was counted last first; then 6 zero bits
//   entry   count (bits 0 to 7; 0: empty, as are all entries after it), fingerprint (bits 8 to 21)
//
// Not thread-safe: one thread works on a line at a time.
#ifndef DYNEMB_TABLE_ADMISSION_LINE_H_
#define DYNEMB_TABLE_ADMISSION_LINE_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/bits.h"
#include "cc/table/hash.h"
#include "cc/table/portability.h"

namespace dynemb {

// A copy of a line, worked on as a number of eight words: to move an entry shifts all before it by
// an entry. The loops have constant bounds, so that a GPU keeps the words in registers.
class AdmissionLine {
 public:
  static constexpr size_t kWords = 8;  // of 64 bits
  static constexpr uint32_t kEntries = 23;
  static constexpr uint32_t kCountBits = 8;
  static constexpr uint32_t kEntryBits = 22;
  static constexpr uint32_t kMostCount = (1u << kCountBits) - 1;

  DYNEMB_HD explicit AdmissionLine(const uint64_t* line) {
    for (size_t w = 0; w < kWords; ++w) words_[w] = line[w];
  }
  DYNEMB_HD void Store(uint64_t* line) const {
    for (size_t w = 0; w < kWords; ++w) line[w] = words_[w];
  }

  // Counts a key `times` times more. Returns its count.
  DYNEMB_HD uint32_t Count(uint32_t fingerprint, uint32_t times) {
    const Found found = Find(fingerprint);
    const uint32_t more = kMostCount - found.count;
    const uint32_t count = times < more ? found.count + times : kMostCount;
    const uint64_t entry = fingerprint << kCountBits | count;
    if (found.at < kEntries) {
      MoveToFront(found.at, entry);
    } else {
      PushFront(entry);
    }
    return count;
  }
  // The count of a key; 0 if it is not remembered.
  DYNEMB_HD uint32_t CountOf(uint32_t fingerprint) const { return Find(fingerprint).count; }
  // Returns whether the key was remembered.
  DYNEMB_HD bool Forget(uint32_t fingerprint) {
    const Found found = Find(fingerprint);
    if (found.at < kEntries) Remove(found.at);
    return found.at < kEntries;
  }
  // Counts a key, and forgets it if its count is at least `enough`. Returns whether it is.
  DYNEMB_HD bool CountUntil(uint32_t fingerprint, uint32_t times, uint32_t enough) {
    if (Count(fingerprint, times) < enough) return false;
    Remove(0);  // where Count has put it
    return true;
  }

  // Whether Count can have left this line.
  static bool IsValid(const uint64_t* line);
  // The entries of both lines in turn. If two entries have one fingerprint, the first is kept.
  static AdmissionLine Merged(const AdmissionLine& a, const AdmissionLine& b);

 private:
  static constexpr uint64_t kEntryMask = (uint64_t{1} << kEntryBits) - 1;
  static_assert(kEntries * kEntryBits <= 64 * kWords, "the entries fill a line");

  static constexpr uint32_t kUsedOfLastWord = kEntries * kEntryBits - 64 * (kWords - 1);  // bits

  DYNEMB_HD uint32_t At(uint32_t e) const {
    const uint32_t bit = e * kEntryBits, word = bit / 64, shift = bit % 64;
    uint64_t bits = words_[word] >> shift;
    if (shift + kEntryBits > 64) bits |= words_[word + 1] << (64 - shift);
    return static_cast<uint32_t>(bits & kEntryMask);
  }
  // The bits of word w that belong to the first n entries.
  DYNEMB_HD static uint64_t BitsBelow(uint32_t n, uint32_t w) {
    const uint32_t end = n * kEntryBits, begin = 64 * w;
    const uint32_t bits = end > begin ? end - begin : 0;
    return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  }

  // Word w of a line whose entries are all `entry`.
  DYNEMB_HD static uint64_t Repeated(uint64_t entry, uint32_t w) {
    const uint64_t all = entry | entry << kEntryBits | entry << 2 * kEntryBits;
    // The 20 bits after those; a word begins at most 20 bits after the beginning of an entry.
    const uint64_t next = entry >> (64 - 2 * kEntryBits) | entry << (3 * kEntryBits - 64);
    const uint32_t begin = 64 * w % kEntryBits;  // of the word, in an entry
    return begin == 0 ? all : all >> begin | next << (64 - begin);
  }

  // The place of a fingerprint and its count; kEntries and 0 if it has none.
  struct Found {
    uint32_t at, count;
  };
  // Find adds the largest fingerprint to the exclusive or of each entry with the fingerprint, as
  // numbers of 512 bits. The sum carries into the next entry unless the two are equal. The counts
  // are masked out, so that a carry goes no further than into the lowest bit of an entry.
  DYNEMB_HD Found Find(uint32_t fingerprint) const {
    constexpr uint64_t kFingerprints = kEntryMask - kMostCount;
    uint64_t carry = 1;     // as if an entry before the first one were another
    uint64_t same[kWords];  // the lowest bits of the entries that follow one with the fingerprint
    uint64_t any = 0;
    for (uint32_t w = 0; w < kWords; ++w) {
      const uint64_t differ = (words_[w] ^ Repeated(uint64_t{fingerprint} << kCountBits, w)) &
                              Repeated(kFingerprints, w);
      // The sum in parentheses does not overflow, because it has zeros where the counts are.
      const uint64_t sum = differ + (Repeated(kFingerprints, w) + carry);
      carry = sum < differ ? 1 : 0;
      same[w] = ~sum & Repeated(1, w);
      any |= same[w];
    }
    if (any == 0) return {kEntries, 0};
    // The first of them. Its entry ends at its bit.
    uint64_t bits = 0, word = 0, before = 0;
    uint32_t number = 0;
    for (uint32_t w = kWords; w-- > 0;) {
      const bool is = same[w] != 0;
      number = is ? w : number;
      bits = is ? same[w] : bits;
      word = is ? words_[w] : word;
      before = is ? (w > 0 ? words_[w - 1] : 0) : before;
    }
    const uint32_t end = LowestBit(bits);
    const uint64_t entry = end >= kEntryBits
                               ? word >> (end - kEntryBits)
                               : word << (kEntryBits - end) | before >> (64 - kEntryBits + end);
    const uint32_t count = static_cast<uint32_t>(entry) & kMostCount;
    // An empty entry is found by fingerprint 0.
    if (count == 0) return {kEntries, 0};
    return {(64 * number + end) / kEntryBits - 1, count};
  }
  // All entries move one place back; the last one falls out.
  DYNEMB_HD void PushFront(uint64_t entry) {
    uint64_t before = entry << (64 - kEntryBits);
    for (uint32_t w = 0; w < kWords; ++w) {
      const uint64_t word = words_[w];
      words_[w] = word << kEntryBits | before >> (64 - kEntryBits);
      before = word;
    }
    words_[kWords - 1] &= (uint64_t{1} << kUsedOfLastWord) - 1;
  }
  // The entries before entry `at` move one place back, over it.
  DYNEMB_HD void MoveToFront(uint32_t at, uint64_t entry) {
    uint64_t before = entry << (64 - kEntryBits);
    for (uint32_t w = 0; w < kWords; ++w) {
      const uint64_t word = words_[w];
      const uint64_t moved = word << kEntryBits | before >> (64 - kEntryBits);
      words_[w] = word ^ ((word ^ moved) & BitsBelow(at + 1, w));
      before = word;
    }
  }
  // The entries after entry `at` move one place to the front, over it.
  DYNEMB_HD void Remove(uint32_t at) {
    uint64_t after = 0;
    for (uint32_t w = kWords; w-- > 0;) {
      const uint64_t word = words_[w];
      const uint64_t moved = word >> kEntryBits | after << (64 - kEntryBits);
      words_[w] = moved ^ ((word ^ moved) & BitsBelow(at, w));
      after = word;
    }
  }

  uint64_t words_[kWords];
};

// The lines [first, first + num) of `lines` lines over all ranks.
struct AdmissionLines {
  int64_t lines = 0;
  int64_t first = 0;
  int64_t num = 0;

  // Where a key is counted.
  struct Place {
    uint32_t line;  // from 0, of these lines
    uint32_t fingerprint;
  };
  // The place of a key, which is a bit pattern; a 32-bit key is zero-extended. A key of another
  // rank has a place, too, which it shares with keys of this rank.
  DYNEMB_HD Place Of(uint64_t key) const {
    const uint64_t line = HighProduct(HashKey(key, kOwnerSalt), static_cast<uint64_t>(lines));
    // Unsigned: a line before the first one becomes a large number.
    const uint64_t from_first = line - static_cast<uint64_t>(first);
    const uint64_t count = static_cast<uint64_t>(num);
    constexpr uint32_t kUnused = 64 - AdmissionLine::kEntryBits + AdmissionLine::kCountBits;
    return {static_cast<uint32_t>(from_first < count ? from_first : line % count),
            static_cast<uint32_t>(HashKey(key, kAdmissionSalt) >> kUnused)};
  }

 private:
  DYNEMB_HD static uint64_t HighProduct(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
  }
};

// The draws of one lookup: whether a key is admitted by chance.
struct AdmissionDraws {
  uint64_t salt = 0;     // of the lookup
  double refusal = 0.0;  // the probability that one occurrence does not admit its key

  // With probability 1 - refusal^times. A key with `times` 0 is refused.
  DYNEMB_HD bool Admits(uint64_t key, uint32_t times) const {
    // Products alone, in a fixed order: host and devices get the same bits.
    double all_refuse = 1.0;
    double power = refusal;
    for (uint32_t n = times; n != 0; n >>= 1, power *= power) {
      if ((n & 1) != 0) all_refuse *= power;
    }
    // Uniform in (0, 1].
    const uint64_t drawn = (uint64_t{1} << 53) - (HashKey(key, salt) >> 11);
    return times != 0 && all_refuse < static_cast<double>(drawn) * 0x1p-53;
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ADMISSION_LINE_H_
