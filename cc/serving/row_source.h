// RowSource: rows by key in arrays that do not change: a shard of a base (mapped files), or the
// changes of deltas (memory).
//
//   slots   [2^log_slots] u32: 0, or 1 + the position of a key (docs/file_format.md, index)
//   keys    [n]: the keys of rows, then deleted keys
//   vectors [live]: rows of the source's format (vector_format.h)
//
// FindRows looks up a range of keys in stages (staged.h). In each source, a key passes through
// these:
//
// 1. Seek: hash the key, and prefetch its slot.
// 2. Read: read the slot, and prefetch the key that it names.
// 3. Probe, kProbes times: compare the keys. If they are equal, prefetch the vector, otherwise read
//    the next slot, and prefetch its key.
// 4. Finish: probe until the key or an empty slot is found. In an index that is half full, as full
//    as the writer makes it, 11% of the keys need more than two probes.
#ifndef DYNEMB_SERVING_ROW_SOURCE_H_
#define DYNEMB_SERVING_ROW_SOURCE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/serving/verified_file.h"
#include "cc/table/hash.h"
#include "cc/table/row_prefetch.h"
#include "cc/table/unaligned.h"
#include "cc/table/vector_format.h"

namespace dynemb {

// Where a key was found.
class Place {
 public:
  constexpr Place() = default;  // no source has the key
  constexpr Place(const char* row, VectorFormat format) : row_(row), format_(format) {}
  static constexpr Place Deleted() { return Place(&kDeletedByte, VectorFormat::kFloat32); }

  bool is_known() const { return row_ != nullptr; }
  bool has_row() const { return row_ != nullptr && row_ != &kDeletedByte; }
  // The stored vector of a key that has a row.
  const char* row() const { return row_; }
  VectorFormat format() const { return format_; }

 private:
  static constexpr char kDeletedByte = 0;

  const char* row_ = nullptr;
  VectorFormat format_ = VectorFormat::kFloat32;
};

struct RowSource {
  const uint32_t* slots = nullptr;
  const char* keys = nullptr;
  const char* vectors = nullptr;
  uint64_t salt = 0;
  uint32_t log_slots = 2;
  uint64_t live = 0;  // the number of rows
  uint64_t n = 0;     // the number of keys
  VectorFormat format = VectorFormat::kFloat32;
  size_t row_bytes = 0;
  // The files of the arrays, if they have to be verified as they are read; otherwise null.
  const VerifiedFile* slots_file = nullptr;
  const VerifiedFile* keys_file = nullptr;
  const VerifiedFile* vectors_file = nullptr;
};

// A key on its way through the sources.
template <class K>
struct RowFlight {
  K key;
  uint32_t entry;  // that the current source has for the key; 0 if none
  uint64_t at;     // the slot of `entry`
  Place place;     // not known until a source has the key

  void Seek(const RowSource& source) {
    at = HashKey(key, source.salt) >> (64 - source.log_slots);
    PrefetchLine(source.slots + at);
  }

  // Returns false if the source is damaged, as do Probe and Finish.
  bool Read(const RowSource& source) {
    const uint32_t* const address = source.slots + at;
    if (source.slots_file != nullptr &&
        !source.slots_file->Ensure(reinterpret_cast<const char*>(address), sizeof(uint32_t))) {
      return false;
    }
    entry = *address;
    if (entry > source.n) return false;
    if (entry != 0) PrefetchLine(source.keys + (uint64_t{entry} - 1) * sizeof(K));
    return true;
  }

  bool Probe(const RowSource& source, bool reads) {
    if (entry == 0 || place.is_known()) return true;
    const char* const found = source.keys + (uint64_t{entry} - 1) * sizeof(K);
    if (source.keys_file != nullptr && !source.keys_file->Ensure(found, sizeof(K))) return false;
    if (LoadUnaligned<K>(found) == key) return SetPlace(source, reads);
    at = (at + 1) & ((uint64_t{1} << source.log_slots) - 1);
    return Read(source);
  }

  bool Finish(const RowSource& source, bool reads) {
    // Each probe of a key finds another one, so more probes than keys mean a damaged index.
    for (uint64_t probes = 0; entry != 0 && !place.is_known(); ++probes) {
      if (probes > source.n || !Probe(source, reads)) return false;
    }
    return true;
  }

 private:
  bool SetPlace(const RowSource& source, bool reads) {
    place = Place::Deleted();
    if (entry > source.live) return true;
    const char* const row = source.vectors + (uint64_t{entry} - 1) * source.row_bytes;
    place = Place(row, source.format);
    if (!reads) return true;
    if (source.vectors_file != nullptr && !source.vectors_file->Ensure(row, source.row_bytes)) {
      return false;
    }
    RowPrefetch(source.vectors, source.row_bytes, source.row_bytes)(row);
    return true;
  }
};

// Calls visit(i, key, place) for each i in [begin, end), in order, where key = key_at(i). The place
// is that in the first source that has the key, perhaps as a deleted one. Returns false if a source
// is damaged; later keys are not visited then. If `reads` is false, the caller does not read the
// vectors, and their blocks are not verified.
//
// kSources is the number of sources if it is known at compile time, otherwise 0.
template <size_t kSources, class K, class KeyAt, class Visit>
bool FindRows(const RowSource* sources, size_t num_sources, const KeyAt& key_at, size_t begin,
              size_t end, bool reads, const Visit& visit) {
  constexpr size_t kRing = 128, kMostBlock = 16, kProbes = 2;
  constexpr size_t kSteps = 2 + kProbes;  // in each source: Read, Probe, Finish
  // A key passes through the first sources with others, and through the rest, if any, alone.
  constexpr size_t kMostPiped = (kRing - 2) / kSteps;
  const size_t piped = kSources != 0 ? kSources : std::min(num_sources, kMostPiped);
  const size_t steps = kSteps * piped + 1;  // and the visit
  const size_t block = std::min(kMostBlock, kRing / (steps + 1));
  RowFlight<K> ring[kRing];

  const auto start = [&](size_t i) {
    RowFlight<K>& flight = ring[i % kRing];
    flight.key = key_at(i);
    flight.place = Place();
    if (piped != 0) flight.Seek(sources[0]);
    return true;
  };
  // Step `step` of a key in a source.
  const auto advance = [&](size_t i, size_t source, size_t step) {
    RowFlight<K>& flight = ring[i % kRing];
    if (flight.place.is_known()) return true;
    if (step == 0) return flight.Read(sources[source]);
    if (step <= kProbes) return flight.Probe(sources[source], reads);
    if (!flight.Finish(sources[source], reads)) return false;
    if (source + 1 < piped && !flight.place.is_known()) flight.Seek(sources[source + 1]);
    return true;
  };
  const auto finish = [&](size_t i) {
    RowFlight<K>& flight = ring[i % kRing];
    for (size_t s = piped; s < num_sources && !flight.place.is_known(); ++s) {
      flight.Seek(sources[s]);
      if (!flight.Read(sources[s]) || !flight.Finish(sources[s], reads)) return false;
    }
    visit(i, flight.key, flight.place);
    return true;
  };

  const size_t n = end - begin;
  for (size_t turn = 0; turn < n + steps * block; turn += block) {
    size_t first = turn;  // of the step's block; wraps around before there is one
    const auto for_block = [&](const auto& fn) {
      const size_t last = first < n ? std::min(first + block, n) : first;
      for (size_t i = first; i != last; ++i) {
        if (!fn(begin + i)) return false;
      }
      first -= block;
      return true;
    };
    if (!for_block(start)) return false;
    for (size_t source = 0; source < piped; ++source) {
      for (size_t step = 0; step < kSteps; ++step) {
        if (!for_block([&](size_t i) { return advance(i, source, step); })) return false;
      }
    }
    if (!for_block(finish)) return false;
  }
  return true;
}

}  // namespace dynemb

#endif  // DYNEMB_SERVING_ROW_SOURCE_H_
