// Route and Requests (cc/lookup/route.h) on a device: the keys that this rank requests from each
// rank, and the keys in the messages that other ranks sent.
//
// The messages are the same as on the host, except for the order of keys. In a table's request, the
// keys of one owner are in the order of their first ids, feature after feature.
//
//   DYNEMB_RETURN_IF_ERROR(device::Route(
//       session, tasks, ranks, self, [&](const RouteSizes& sizes, int32_t** words, int32_t** own) {
//         ... allocate sizes.words[r] words for each rank r, and sizes.num_own_words ...
//       }));
//
// Ids, words, own, index and keys are in the device's memory; splits and counts are in host memory.
// The number of launches does not depend on the number of tables, features or ranks. Route and
// ReceiveKeys each wait once, for the numbers of keys, unless there are no ids or no headers. The
// rest of their work is queued on the stream.
#ifndef DYNEMB_DEVICE_ROUTE_H_
#define DYNEMB_DEVICE_ROUTE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc/device/kernels.h"
#include "cc/device/kernels_route.h"
#include "cc/device/parts.h"
#include "cc/lookup/route.h"
#include "cc/table/phase.h"
#include "cc/table/status.h"

namespace dynemb::device {

namespace internal_route {

// The ids of all tasks.
struct Ids {
  size_t n = 0;
  size_t ranks = 0;
  size_t num_sections = 0;
  RouteKeys keys;
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  uint64_t* sections = nullptr;   // [n], sorted
  uint32_t* positions = nullptr;  // [n]
  uint32_t* begins = nullptr;     // [num_sections + 1]
};

// Sorts the keys by table and owner. Waits.
template <class Session>
Status SortKeys(Session& session, const std::vector<RoutePart>& parts,
                const std::vector<uint32_t>& part_begins, Ids* ids, std::vector<int64_t>* counts) {
  ids->keys.features = ToDevice(session, parts, part_begins);
  ids->sections = session.template Take<uint64_t>(ids->n);
  ids->positions = session.template Take<uint32_t>(ids->n);
  auto* const read_back = session.template Pinned<uint32_t>(ids->num_sections + 1);
  Elect</*kLast=*/false>(session, ids->keys, /*rows=*/nullptr, ids->n, &ids->places, &ids->of);
  DYNEMB_RETURN_IF_ERROR(session.status());
  session.ForEach(ids->n, ListSections{ids->keys, ids->places, ids->of, ids->ranks,
                                       ids->num_sections, ids->sections, ids->positions});
  session.SortPairs(ids->sections, ids->positions, ids->n, BitsBelow(ids->num_sections + 1));
  session.ForEach(ids->num_sections + 1, FindBegins{ids->sections, ids->n, ids->begins});
  session.Copy(read_back, ids->begins, (ids->num_sections + 1) * sizeof(uint32_t));
  DYNEMB_RETURN_IF_ERROR(session.Synchronize());
  for (size_t s = 0; s < ids->num_sections; ++s) (*counts)[s] = read_back[s + 1] - read_back[s];
  return Status();
}

}  // namespace internal_route

// place(const RouteSizes&, int32_t** words, int32_t** own) is called once, on the calling thread.
// It sets the addresses of the messages, in the order of the ranks, and of the message to `self`.
// If it fails, its error is returned. `self` may be kNoRank.
//
// Fails like Route::Prepare, or if all tasks together have more than 2^32 - 2 ids, before any work
// is given. If a message would be too long, it fails before `place` is called.
template <class Session, class Place>
Status Route(Session& session, const std::vector<RouteTask>& tasks, uint32_t ranks, uint32_t self,
             const Place& place) {
  DYNEMB_RETURN_IF_ERROR(CheckRoute(tasks, ranks));
  std::vector<RoutePart> parts;
  std::vector<uint32_t> begins{0};
  size_t n = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    RoutePart part;
    part.owners = tasks[t].owners;
    part.table = static_cast<uint32_t>(t);
    part.table_begin = static_cast<uint32_t>(n);
    const size_t first = parts.size();
    for (const RouteIds& feature : tasks[t].features) {
      DYNEMB_RETURN_IF_ERROR(CheckTotal(n += feature.n, "ids"));
      part.keys = {feature.keys, SizeOf(tasks[t].key_type)};
      part.index = feature.index;
      parts.push_back(part);
      begins.push_back(static_cast<uint32_t>(n));
    }
    for (size_t f = first; f < parts.size(); ++f) parts[f].table_end = static_cast<uint32_t>(n);
  }
  internal_route::Ids ids;
  ids.n = n;
  ids.ranks = ranks;
  ids.num_sections = tasks.size() * ranks;
  ids.begins = session.template Take<uint32_t>(ids.num_sections + 1);
  std::vector<int64_t> counts(ids.num_sections, 0);
  if (n != 0) {
    Phase phase("route ids");
    DYNEMB_RETURN_IF_ERROR(internal_route::SortKeys(session, parts, begins, &ids, &counts));
  } else {
    DYNEMB_RETURN_IF_ERROR(session.status());
    session.Fill(ids.begins, 0, (ids.num_sections + 1) * sizeof(uint32_t));
  }
  const std::vector<KeyType> key_types = KeyTypesOf(tasks);
  RouteSizes sizes;
  DYNEMB_RETURN_IF_ERROR(SizesOf(key_types, std::move(counts), ranks, self, &sizes));
  int32_t* words = nullptr;
  int32_t* own = nullptr;
  DYNEMB_RETURN_IF_ERROR(place(sizes, &words, &own));

  Phase phase("write keys to send");
  std::vector<RouteSection> sections(ids.num_sections);
  ForEachSection(key_types, sizes, self, words, own,
                 [&](size_t t, uint32_t rank, int32_t* header, int32_t* keys) {
                   sections[t * ranks + rank] = {header, keys};
                 });
  const RouteSection* const to = ToDevice(session, sections.data(), sections.size());
  auto* const requested = session.template Take<uint32_t>(n);
  DYNEMB_RETURN_IF_ERROR(session.status());
  session.ForEach(std::max(ids.num_sections, n),
                  WriteRequests{ids.keys, ids.sections, ids.positions, ids.begins, ids.num_sections,
                                to, ids.ranks, requested});
  session.ForEach(n, WriteIndex{ids.keys.features, ids.places, ids.of, requested});
  return session.status();
}

// place(size_t table, const int64_t* counts, void** keys) is called once per table, in order, on
// the calling thread. `counts`, [ranks], are the numbers of keys that each rank requests; `place`
// sets the address to which they are written, rank after rank. If it fails, its error is returned.
//
// Fails like Requests::Init, or if there are more than 2^32 - 2 keys, before `place` is called.
template <class Session, class Place>
Status ReceiveKeys(Session& session, const Requests::Received& received,
                   const std::vector<KeyType>& key_types, const Place& place) {
  Phase phase("receive keys");
  const size_t tables = key_types.size();
  std::vector<const int32_t*> headers = Requests::Headers(received, tables);
  const size_t num_counts = headers.size() * tables;
  if (num_counts != 0) {
    const int32_t* const* const from = ToDevice(session, headers.data(), headers.size());
    auto* const counts = session.template Take<int32_t>(num_counts);
    auto* const read_back = session.template Pinned<int32_t>(num_counts);
    DYNEMB_RETURN_IF_ERROR(session.status());
    session.ForEach(num_counts, ReadHeaders{from, tables, counts});
    session.Copy(read_back, counts, num_counts * sizeof(int32_t));
    DYNEMB_RETURN_IF_ERROR(session.Synchronize());
    for (size_t rank = 0; rank < headers.size(); ++rank) headers[rank] = read_back + rank * tables;
  }
  Requests requests;
  DYNEMB_RETURN_IF_ERROR(requests.Init(received, key_types, headers));
  std::vector<const int32_t*> sections;
  std::vector<uint32_t> begins{0};
  size_t n = 0;
  for (size_t t = 0; t < tables; ++t) {
    for (uint32_t rank = 0; rank < received.ranks; ++rank) {
      n += static_cast<size_t>(requests.count(t, rank));
      DYNEMB_RETURN_IF_ERROR(CheckTotal(n, "keys"));
      sections.push_back(requests.begin(t, rank));
      begins.push_back(static_cast<uint32_t>(n));
    }
  }
  std::vector<ReceivedTable> to(tables);
  for (size_t t = 0; t < tables; ++t) {
    to[t] = {nullptr, SizeOf(key_types[t])};
    DYNEMB_RETURN_IF_ERROR(place(t, requests.counts(t), &to[t].keys));
  }
  if (n == 0) return session.status();
  const Parts<const int32_t*> from = ToDevice(session, sections, begins);
  const ReceivedTable* const on_device = ToDevice(session, to.data(), to.size());
  DYNEMB_RETURN_IF_ERROR(session.status());
  session.ForEach(n, CopyReceivedKeys{from, on_device, received.ranks});
  return session.status();
}

// to[i] = the rank that holds keys[i], for n keys.
template <class Session>
Status OwnersOf(Session& session, const Owners& owners, KeyType type, const void* keys, size_t n,
                int32_t* to) {
  session.ForEach(n, FindOwners{owners, {keys, SizeOf(type)}, to});
  return session.status();
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_ROUTE_H_
