// Parts: one launch over several arrays of different lengths. Their items are numbered array after
// array, and each thread finds the array of its item. The data of array p that kernels need is its
// *part*.
//
//   std::vector<MyPart> parts; std::vector<uint32_t> begins{0};   // begins: one more than parts
//   const Parts<MyPart> view = ToDevice(session, parts, begins);
//   session.ForEach(begins.back(), MyBody{view});                 // view.IndexOf(i), view[p]
#ifndef DYNEMB_DEVICE_PARTS_H_
#define DYNEMB_DEVICE_PARTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "cc/device/ranges.h"
#include "cc/lookup/bags.h"
#include "cc/table/portability.h"
#include "cc/table/status.h"

namespace dynemb::device {

// InvalidArgument if `total` items of all parts cannot be numbered in 32 bits. `what` is the name
// of the items in the message.
inline Status CheckTotal(size_t total, const char* what) {
  constexpr size_t kMost = Bags::kMaxSize;
  if (total <= kMost) return Status();
  return InvalidArgument("all tables together may have at most 2^32 - 2 " + std::string(what) +
                         " in a batch, got " + std::to_string(total));
}

// The number of bits of the numbers below n.
inline int BitsBelow(size_t n) {
  int bits = 0;
  while ((size_t{1} << bits) < n) ++bits;
  return bits;
}

// The number of neighboring items, at most `most`, that one team of ForRows has. A team that has
// several reads the rows of some of them at the same time; with too few teams, a part of the device
// would be idle.
template <class Session>
uint32_t RunLength(const Session& session, size_t items, size_t quads, uint32_t most) {
  const size_t least_teams = 2 * session.Teams(quads);
  return static_cast<uint32_t>(std::min<size_t>(most, std::max<size_t>(1, items / least_teams)));
}
inline size_t NumRuns(size_t items, uint32_t length) { return (items + length - 1) / length; }

template <class Part>
struct Parts {
  const Part* parts = nullptr;
  const uint32_t* begins = nullptr;  // [count + 1]: part p has the items [begins[p], begins[p + 1])
  uint32_t count = 0;

  DYNEMB_HD const Part& operator[](uint32_t p) const { return parts[p]; }
  DYNEMB_HD uint32_t begin(uint32_t p) const { return begins[p]; }
  DYNEMB_HD uint32_t end(uint32_t p) const { return begins[p + 1]; }
  // The part that has item i.
  DYNEMB_HD uint32_t IndexOf(size_t i) const { return RangeOf(begins, count, i); }
};

// Copies an array to the device's memory; valid until the session ends. Null if the session has
// failed.
template <class T, class Session, class From>
T* ToDeviceAs(Session& session, const From* values, size_t n) {
  T* const to = session.template Take<T>(n);
  T* const from = session.template Pinned<T>(n);
  if (to == nullptr || from == nullptr) return nullptr;
  std::copy(values, values + n, from);
  session.Copy(to, from, n * sizeof(T));
  return to;
}
template <class T, class Session>
T* ToDevice(Session& session, const T* values, size_t n) {
  return ToDeviceAs<T>(session, values, n);
}
// Both arrays by one copy.
template <class Part, class Session>
Parts<Part> ToDevice(Session& session, const std::vector<Part>& parts,
                     const std::vector<uint32_t>& begins) {
  static_assert(std::is_trivially_copyable_v<Part> && alignof(Part) >= alignof(uint32_t));
  const size_t parts_bytes = parts.size() * sizeof(Part);
  const size_t bytes = parts_bytes + begins.size() * sizeof(uint32_t);
  char* const to = session.template Take<char>(bytes);
  char* const from = session.template Pinned<char>(bytes);
  if (to == nullptr || from == nullptr) return {};
  std::memcpy(from, parts.data(), parts_bytes);
  std::memcpy(from + parts_bytes, begins.data(), begins.size() * sizeof(uint32_t));
  session.Copy(to, from, bytes);
  return {reinterpret_cast<const Part*>(to), reinterpret_cast<const uint32_t*>(to + parts_bytes),
          static_cast<uint32_t>(parts.size())};
}

// The view of Bags (cc/lookup/bags.h) for kernels. The host checks bags, and converts them to this
// form.
struct BagsView {
  const uint32_t* splits = nullptr;  // [num_bags + 1]; null: `hotness` ids in each bag
  const uint32_t* order = nullptr;   // [nnz]: the ids' positions in bag order; null: in order
  uint32_t hotness = 0;
  uint32_t num_bags = 0;

  DYNEMB_HD uint32_t begin(uint32_t bag) const {
    return splits != nullptr ? splits[bag] : bag * hotness;
  }
  DYNEMB_HD uint32_t end(uint32_t bag) const { return begin(bag + 1); }
  DYNEMB_HD uint32_t position(uint32_t place) const {
    return order != nullptr ? order[place] : place;
  }
  // The bag of a place in bag order.
  DYNEMB_HD uint32_t BagOf(uint32_t place) const {
    return splits == nullptr ? place / hotness : RangeOf(splits, num_bags, place);
  }
};

template <class Session>
BagsView ToDevice(Session& session, const Bags& bags) {
  BagsView view;
  view.hotness = static_cast<uint32_t>(bags.hotness());
  view.num_bags = static_cast<uint32_t>(bags.num_bags());
  if (bags.splits() != nullptr) {
    view.splits = ToDeviceAs<uint32_t>(session, bags.splits(), bags.num_bags() + 1);
  }
  if (bags.order() != nullptr) view.order = ToDevice(session, bags.order(), bags.nnz());
  return view;
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_PARTS_H_
