// The kernels of Route and ReceiveKeys (route.h). The ids of all features are numbered table after
// table, and within a table feature after feature; an id's *position* is this number. A *section*
// is the keys of one table for one rank; the section of table t and rank r is number t × ranks + r.
// The steps, in this order:
//
//   Elect                      finds the distinct keys of each table, by their first positions
//   ListSections, SortPairs    bring these positions together by section, in order
//   FindBegins                 finds the begin of each section, and thereby its number of keys
//   WriteRequests              writes the messages, and each key's index in its table's request
//   WriteIndex                 writes this index for each id
#ifndef DYNEMB_DEVICE_KERNELS_ROUTE_H_
#define DYNEMB_DEVICE_KERNELS_ROUTE_H_

#include <cstddef>
#include <cstdint>

#include "cc/device/flat_index.h"
#include "cc/device/parts.h"
#include "cc/lookup/owners.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"

namespace dynemb::device {

// Keys in a message are words: 64-bit keys need not be at multiples of 8 bytes.
DYNEMB_HD inline uint64_t LoadKeyWords(const int32_t* words, size_t key_size, size_t i) {
  const auto* const bits = reinterpret_cast<const uint32_t*>(words);
  if (key_size == 4) return bits[i];
  return bits[2 * i] | uint64_t{bits[2 * i + 1]} << 32;
}
DYNEMB_HD inline void StoreKeyWords(int32_t* words, size_t key_size, size_t i, uint64_t key) {
  auto* const bits = reinterpret_cast<uint32_t*>(words);
  if (key_size == 4) {
    bits[i] = static_cast<uint32_t>(key);
  } else {
    bits[2 * i] = static_cast<uint32_t>(key);
    bits[2 * i + 1] = static_cast<uint32_t>(key >> 32);
  }
}

// The ids of a feature.
struct RoutePart {
  KeyArray keys;
  uint32_t* index = nullptr;
  Owners owners;
  uint32_t table = 0;
  uint32_t table_begin = 0;  // the table's positions are [table_begin, table_end)
  uint32_t table_end = 0;
};

// The keys of all tables, for ElectPositions. Equal keys of different tables are distinct.
struct RouteKeys {
  Parts<RoutePart> features;

  DYNEMB_HD uint64_t Hash(size_t i) const {
    const uint32_t f = features.IndexOf(i);
    return ElectionHash(KeyOf(f, i), features[f].table);
  }
  DYNEMB_HD bool Same(size_t i, size_t j) const {
    const uint32_t f = features.IndexOf(j);
    const RoutePart& part = features[f];
    return part.table_begin <= i && i < part.table_end &&
           KeyOf(features.IndexOf(i), i) == KeyOf(f, j);
  }
  // The key of the id at position i, which is in feature f.
  DYNEMB_HD uint64_t KeyOf(uint32_t f, size_t i) const {
    return features[f].keys[i - features.begin(f)];
  }
};

// Lists the section of each key at its first position, and num_sections at all other positions.
struct ListSections {
  RouteKeys keys;
  const uint32_t* places;
  const uint32_t* of;
  size_t ranks;
  size_t num_sections;
  uint64_t* sections;
  uint32_t* positions;

  DYNEMB_HD void operator()(size_t i) const {
    uint64_t section = num_sections;
    if (places[of[i]] == i) {
      const uint32_t f = keys.features.IndexOf(i);
      const RoutePart& part = keys.features[f];
      section = part.table * ranks + part.owners.Of(keys.KeyOf(f, i));
    }
    sections[i] = section;
    positions[i] = static_cast<uint32_t>(i);
  }
};

// begins[s] = the number of entries of the sorted `sections` that are less than s.
struct FindBegins {
  const uint64_t* sections;
  size_t n;
  uint32_t* begins;

  DYNEMB_HD void operator()(size_t s) const {
    size_t low = 0, high = n;
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (sections[middle] < s) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    begins[s] = static_cast<uint32_t>(low);
  }
};

// The addresses of a section in a message.
struct RouteSection {
  int32_t* header;  // its number of keys
  int32_t* keys;
};

// Item i handles section i, if it exists, and the i-th key of all sections, if it exists.
struct WriteRequests {
  RouteKeys keys;
  const uint64_t* sections;  // sorted
  const uint32_t* positions;
  const uint32_t* begins;  // [num_sections + 1]
  size_t num_sections;
  const RouteSection* to;  // [num_sections]
  size_t ranks;
  uint32_t* requested;  // out, at a key's first position: its index in its table's request

  DYNEMB_HD void operator()(size_t i) const {
    if (i < num_sections) *to[i].header = static_cast<int32_t>(begins[i + 1] - begins[i]);
    if (i >= begins[num_sections]) return;
    const uint64_t section = sections[i];
    const uint32_t position = positions[i], f = keys.features.IndexOf(position);
    const RoutePart& part = keys.features[f];
    StoreKeyWords(to[section].keys, part.keys.key_size, i - begins[section],
                  keys.KeyOf(f, position));
    requested[position] = static_cast<uint32_t>(i) - begins[part.table * ranks];
  }
};

struct WriteIndex {
  Parts<RoutePart> features;
  const uint32_t* places;
  const uint32_t* of;
  const uint32_t* requested;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t f = features.IndexOf(i);
    features[f].index[i - features.begin(f)] = requested[places[of[i]]];
  }
};

// Copies the headers of all messages to `counts`, message after message.
struct ReadHeaders {
  const int32_t* const* headers;  // each has `tables` counts
  size_t tables;
  int32_t* counts;

  DYNEMB_HD void operator()(size_t i) const { counts[i] = headers[i / tables][i % tables]; }
};

// The keys of a table.
struct ReceivedTable {
  void* keys;
  size_t key_size;
};

struct CopyReceivedKeys {
  Parts<const int32_t*> sections;  // the addresses of their keys, which are the items of a part
  const ReceivedTable* tables;
  uint32_t ranks;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t s = sections.IndexOf(i), t = s / ranks;
    const size_t key_size = tables[t].key_size;
    const uint64_t key = LoadKeyWords(sections[s], key_size, i - sections.begin(s));
    StoreKey(tables[t].keys, key_size, i - sections.begin(t * ranks), key);
  }
};

struct FindOwners {
  Owners owners;
  KeyArray keys;
  int32_t* to;

  DYNEMB_HD void operator()(size_t i) const { to[i] = static_cast<int32_t>(owners.Of(keys[i])); }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_ROUTE_H_
