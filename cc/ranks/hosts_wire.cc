#include "cc/ranks/hosts_wire.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace dynemb {
namespace {

// Beside those of GlooWire.
constexpr uint64_t kOfferTag = ~uint64_t{2}, kAttachedTag = ~uint64_t{3};
constexpr std::chrono::seconds kToHear{2};
// A rank whose last beat is older does not wait. Shorter than kToHear: it is to be named before.
constexpr std::chrono::seconds kLastBeat{1};

// The ranks of each host, in the order of their first ranks.
std::vector<std::vector<int>> RanksOf(const std::vector<std::string>& hosts) {
  std::vector<std::vector<int>> ranks;
  std::unordered_map<std::string, size_t> number;
  for (size_t r = 0; r < hosts.size(); ++r) {
    const size_t host = number.emplace(hosts[r], ranks.size()).first->second;
    if (host == ranks.size()) ranks.emplace_back();
    ranks[host].push_back(static_cast<int>(r));
  }
  return ranks;
}

// A message of several slices begins with the length of each.
using Length = uint32_t;

Length LengthAt(const std::string& message, size_t i) {
  Length length;
  memcpy(&length, message.data() + i * sizeof(Length), sizeof(Length));
  return length;
}

// Whether a message has n slices, with nothing before, between and after them.
bool IsWhole(const std::string& message, size_t n) {
  size_t bytes = n * sizeof(Length);
  if (message.size() < bytes) return false;
  for (size_t i = 0; i < n; ++i) bytes += LengthAt(message, i);
  return bytes == message.size();
}

}  // namespace

// What an exchange by memory looks at while it waits.
class HostsWire::Waiting {
 public:
  Waiting(HostsWire* wire, const std::string& operation) : wire_(wire), operation_(operation) {}

  Status operator()(std::chrono::steady_clock::duration idle, const std::vector<int>& receives,
                    const std::vector<int>& sends) const {
    const std::vector<int>& here = wire_->hosts_[wire_->host_];
    const auto ranks_of = [&](const std::vector<int>& locals) {
      std::vector<int> ranks;
      for (const int local : locals) ranks.push_back(here[static_cast<size_t>(local)]);
      return ranks;
    };
    for (const std::vector<int>* locals : {&receives, &sends}) {
      for (const int rank : ranks_of(*locals)) {
        // All that it has sent before it ended has been taken since the last look.
        if (ended_[static_cast<size_t>(rank)]) return wire_->gloo_->FailClosed(rank, operation_);
      }
    }
    DYNEMB_RETURN_IF_ERROR(wire_->gloo_->Look(&ended_));
    HearBeats();
    if (idle < wire_->timeout()) return Status();
    std::vector<int> late = receives.empty() ? sends : receives;
    if (idle < wire_->timeout() + 2 * kToHear) {
      const SteadyTime now = std::chrono::steady_clock::now();
      const auto waits = [&](int local) {
        return now - hearts_[static_cast<size_t>(local)].last < kLastBeat;
      };
      late.erase(std::remove_if(late.begin(), late.end(), waits), late.end());
      if (late.empty()) return Status();
    }
    const char* const missed = receives.empty() ? "received nothing" : "sent nothing";
    return wire_->Fail(wire_->gloo_->On(operation_) + wire_->Late(ranks_of(late), missed));
  }

 private:
  using SteadyTime = std::chrono::steady_clock::time_point;
  struct Heart {
    uint32_t beats = 0;
    SteadyTime last{};  // when they were seen to have grown
  };

  // Looks at the beats of the ranks of this host. What they are at first says nothing.
  void HearBeats() const {
    const bool is_first = hearts_.empty();
    hearts_.resize(wire_->hosts_[wire_->host_].size());
    for (size_t local = 0; local < hearts_.size(); ++local) {
      const uint32_t beats = wire_->rings_->beats(static_cast<int>(local));
      if (!is_first && beats != hearts_[local].beats) {
        hearts_[local].last = std::chrono::steady_clock::now();
      }
      hearts_[local].beats = beats;
    }
  }

  HostsWire* const wire_;
  const std::string& operation_;
  // At the last look.
  mutable std::vector<bool> ended_ = std::vector<bool>(wire_->host_of_.size());
  mutable std::vector<Heart> hearts_;  // of each rank of this host
};

HostsWire::HostsWire(std::unique_ptr<GlooWire> gloo, std::vector<std::vector<int>> hosts,
                     std::unique_ptr<SharedRings> rings)
    : Wire(gloo->rank(), gloo->size(), gloo->timeout()),
      gloo_(std::move(gloo)),
      hosts_(std::move(hosts)),
      rings_(std::move(rings)),
      host_of_(static_cast<size_t>(size())),
      host_(0),
      local_(0),
      most_ranks_(0) {
  for (size_t host = 0; host < hosts_.size(); ++host) {
    most_ranks_ = std::max(most_ranks_, hosts_[host].size());
    for (size_t local = 0; local < hosts_[host].size(); ++local) {
      host_of_[static_cast<size_t>(hosts_[host][local])] = host;
      if (hosts_[host][local] != rank()) continue;
      host_ = host;
      local_ = local;
    }
  }
  targets_.resize(hosts_[host_].size());
  for (size_t host = 0; host < hosts_.size(); ++host) {
    if (host == host_) continue;
    for (size_t local = 0; local < hosts_[host].size(); ++local) {
      targets_[local % targets_.size()].push_back(hosts_[host][local]);
    }
  }
  if (rings_ != nullptr) gloo_->set_on_wait([this] { rings_->Beat(); });
}

Status HostsWire::Join(std::unique_ptr<GlooWire> gloo, const std::vector<std::string>& hosts,
                       std::unique_ptr<Wire>* wire) {
  const int size = gloo->size();
  if (hosts.size() != static_cast<size_t>(size)) {
    return InvalidArgument(std::to_string(hosts.size()) + " hosts for " + std::to_string(size) +
                           " ranks");
  }
  const std::vector<std::vector<int>> named = RanksOf(hosts);
  if (named.size() == hosts.size()) {
    *wire = std::move(gloo);
    return Status();
  }
  const std::vector<int>* here = nullptr;
  for (const std::vector<int>& ranks : named) {
    if (hosts[static_cast<size_t>(ranks[0])] == hosts[static_cast<size_t>(gloo->rank())]) {
      here = &ranks;
    }
  }
  // The first rank of a host makes the memory.
  const auto ranks = static_cast<int>(here->size());
  const auto self =
      static_cast<int>(std::find(here->begin(), here->end(), gloo->rank()) - here->begin());
  std::unique_ptr<SharedRings> rings;
  SharedRings::Offer offer;
  Slices offers(size), offered(size);
  if (self == 0 && ranks > 1 && SharedRings::Create(ranks, &rings).ok()) offer = rings->offer();
  if (self != 0) offered[(*here)[0]] = {reinterpret_cast<char*>(&offer), sizeof(offer)};
  for (size_t i = 1; self == 0 && i < here->size(); ++i) {
    offers[(*here)[i]] = {reinterpret_cast<char*>(&offer), sizeof(offer)};
  }
  const std::string operation = "the start of shared memory";
  DYNEMB_RETURN_IF_ERROR(gloo->Exchange(kOfferTag, operation, offers, offered));
  if (self != 0 && offer.process != 0) {
    (void)SharedRings::Attach(offer, self, ranks, &rings);
  }
  // All ranks learn who has the memory.
  char has = rings != nullptr ? 1 : 0;
  std::vector<char> have(hosts.size());
  Slices to(size), from(size);
  for (int r = 0; r < size; ++r) {
    to[r] = {&has, 1};
    from[r] = {&have[static_cast<size_t>(r)], 1};
  }
  DYNEMB_RETURN_IF_ERROR(gloo->Exchange(kAttachedTag, operation, to, from));
  if (rings != nullptr) rings->EndOffer();
  std::vector<std::vector<int>> found;
  for (const std::vector<int>& of_name : named) {
    const bool all = std::all_of(of_name.begin(), of_name.end(),
                                 [&](int r) { return have[static_cast<size_t>(r)] != 0; });
    if (all) {
      found.push_back(of_name);
      continue;
    }
    if (&of_name == here) rings = nullptr;
    for (const int r : of_name) found.push_back({r});
  }
  if (found.size() == hosts.size()) {
    *wire = std::move(gloo);
  } else {
    wire->reset(new HostsWire(std::move(gloo), std::move(found), std::move(rings)));
  }
  return Status();
}

Status HostsWire::Look(std::vector<bool>* ended) {
  const Status status = gloo_->Look(ended);
  return status.ok() ? failure() : Fail(status.message());
}

Status HostsWire::Fail(const std::string& reason) {
  DYNEMB_RETURN_IF_ERROR(gloo_->CheckProcess());
  const Status first = gloo_->Fail(reason);
  (void)Record(first.message());
  return failure();
}

template <class F>
Status HostsWire::Run(const std::string& operation, const F& f) {
  DYNEMB_RETURN_IF_ERROR(gloo_->CheckProcess());
  DYNEMB_RETURN_IF_ERROR(failure());
  try {
    const Status status = f();
    return status.ok() ? status : Fail(status.message());
  } catch (const std::bad_alloc&) {
    (void)Fail(gloo_->On(operation) + "out of memory");
    throw;
  }
}

Status HostsWire::Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                           const Slices& from) {
  return Run(operation, [&] { return Flat(tag, operation, to, from); });
}

Status HostsWire::ExchangeAtMost(size_t most, uint64_t tag, const std::string& operation,
                                 const Slices& to, const Slices& from) {
  // A message of Gloo may be shorter than its room only up to kMostShort.
  static_assert(kMostForwarded <= kMostShort);
  const bool forwarded = hosts_.size() > 1 && most <= kMostForwarded / most_ranks_ - sizeof(Length);
  return Run(operation, [&] {
    return forwarded ? Forwarded(tag, operation, to, from) : Flat(tag, operation, to, from);
  });
}

void HostsWire::Count(const Slices& to) {
  for (const Slices::Slice& slice : to.of) {
    if (slice.bytes == 0) continue;
    messages_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(static_cast<int64_t>(slice.bytes), std::memory_order_relaxed);
  }
}

Status HostsWire::Share(uint64_t tag, const std::string& operation,
                        std::vector<SharedRings::Outgoing>* out,
                        std::vector<SharedRings::Incoming>* in) {
  if (rings_ == nullptr) return Status();
  const Status status = rings_->Exchange(tag, out, in, Waiting(this, operation));
  if (status.ok() || !gloo_->failure().ok()) return status;
  return Internal(gloo_->On(operation) + status.message());
}

Status HostsWire::Flat(uint64_t tag, const std::string& operation, const Slices& to,
                       const Slices& from) {
  std::vector<SharedRings::Outgoing> out;
  std::vector<SharedRings::Incoming> in;
  Slices far_to = to, far_from = from;
  const std::vector<int>& here = hosts_[host_];
  for (size_t i = 0; i < here.size(); ++i) {
    const int r = here[i], local = static_cast<int>(i);
    if (r == rank()) continue;
    if (to[r].bytes != 0) out.push_back({local, {to[r]}});
    if (from[r].bytes != 0) in.push_back({local, from[r].data, from[r].bytes});
    far_to[r].bytes = far_from[r].bytes = 0;
  }
  far_to[rank()].bytes = far_from[rank()].bytes = 0;
  Count(far_to);
  std::shared_ptr<GlooWire::Begun> begun;
  if (hosts_.size() > 1) {
    DYNEMB_RETURN_IF_ERROR(gloo_->Begin(tag, operation, far_to, far_from, &begun));
  }
  DYNEMB_RETURN_IF_ERROR(Share(tag, operation, &out, &in));
  const Slices::Slice& own = to[rank()];
  if (own.bytes != 0) memcpy(from[rank()].data, own.data, own.bytes);
  if (begun == nullptr) return Status();
  return gloo_->Finish(operation, *begun, {});
}

// Sets given[x] to what rank x of this host has for the targets of this rank, and for this rank,
// in this order.
Status HostsWire::GiveToForwarders(uint64_t tag, const std::string& operation, const Slices& to,
                                   std::vector<std::string>* given) {
  const std::vector<int>& here = hosts_[host_];
  std::vector<SharedRings::Outgoing> out;
  std::vector<SharedRings::Incoming> in;
  std::vector<std::vector<Length>> lengths(here.size());
  given->resize(here.size());
  for (size_t i = 0; i < here.size(); ++i) {
    std::vector<Slices::Slice> parts(1);
    for (const int target : targets_[i]) parts.push_back(to[target]);
    parts.push_back(to[here[i]]);
    for (size_t p = 1; p < parts.size(); ++p) {
      lengths[i].push_back(static_cast<Length>(parts[p].bytes));
    }
    if (i == local_) lengths[i].back() = static_cast<Length>(parts.back().bytes = 0);
    parts[0] = {reinterpret_cast<char*>(lengths[i].data()), lengths[i].size() * sizeof(Length)};
    if (i != local_) {
      out.push_back({static_cast<int>(i), std::move(parts)});
      in.push_back({static_cast<int>(i)});
      continue;
    }
    for (const Slices::Slice& part : parts) (*given)[i].append(part.data, part.bytes);
  }
  DYNEMB_RETURN_IF_ERROR(Share(tag, operation, &out, &in));
  for (SharedRings::Incoming& incoming : in) {
    (*given)[static_cast<size_t>(incoming.from)] = std::move(incoming.text);
  }
  for (size_t i = 0; i < here.size(); ++i) {
    if (IsWhole((*given)[i], targets_[local_].size() + 1)) continue;
    return Internal(gloo_->On(operation) + "a message of rank " + std::to_string(here[i]) +
                    " is damaged");
  }
  return Status();
}

Status HostsWire::Forwarded(uint64_t tag, const std::string& operation, const Slices& to,
                            const Slices& from) {
  const std::vector<int>& here = hosts_[host_];
  const auto damaged = [&](int r) {
    return Internal(gloo_->On(operation) + "a message of rank " + std::to_string(r) +
                    " does not fit");
  };
  std::vector<std::string> given;
  DYNEMB_RETURN_IF_ERROR(GiveToForwarders(tag, operation, to, &given));
  const std::vector<int>& targets = targets_[local_];
  auto bundles = std::make_unique<Bundles>();
  bundles->to.resize(targets.size());
  bundles->from.resize(hosts_.size());
  Slices far_to(size()), far_from(size());
  std::vector<size_t> at(here.size(), (targets.size() + 1) * sizeof(Length));
  for (size_t t = 0; t < targets.size(); ++t) {
    std::string& bundle = bundles->to[t];
    size_t bytes = 0;
    for (const std::string& of_rank : given) {
      bytes += LengthAt(of_rank, t);
      bundle.append(of_rank.data() + t * sizeof(Length), sizeof(Length));
    }
    bundle.reserve(bundle.size() + bytes);
    for (size_t i = 0; i < here.size(); ++i) {
      const Length length = LengthAt(given[i], t);
      bundle.append(given[i].data() + at[i], length);
      at[i] += length;
    }
    // Both sides know whether there is anything to send: only slices without room are empty.
    if (bytes != 0) far_to[targets[t]] = {bundle.data(), bundle.size()};
  }
  for (size_t i = 0; i < here.size(); ++i) {
    if (i == local_) continue;
    const size_t length = LengthAt(given[i], targets.size());
    if (length > from[here[i]].bytes) return damaged(here[i]);
    if (length != 0) memcpy(from[here[i]].data, given[i].data() + at[i], length);
  }
  const Slices::Slice& own = to[rank()];
  if (own.bytes != 0) memcpy(from[rank()].data, own.data, own.bytes);
  for (size_t host = 0; host < hosts_.size(); ++host) {
    if (host == host_) continue;
    size_t room = 0;
    for (const int r : hosts_[host]) room += from[r].bytes;
    if (room == 0) continue;
    bundles->from[host].resize(hosts_[host].size() * sizeof(Length) + room);
    far_from[ForwarderOf(host, local_)] = {bundles->from[host].data(), bundles->from[host].size()};
  }
  Count(far_to);
  std::shared_ptr<GlooWire::Begun> begun;
  Status status = gloo_->Begin(tag, operation, far_to, far_from, &begun);
  if (status.ok()) status = gloo_->Finish(operation, *begun, kToHear);
  if (!status.ok()) {
    KeepForever(std::move(bundles));
    return status;
  }
  for (size_t host = 0; host < hosts_.size(); ++host) {
    const std::string& bundle = bundles->from[host];
    if (bundle.empty()) continue;
    const std::vector<int>& ranks = hosts_[host];
    size_t place = ranks.size() * sizeof(Length);
    for (size_t i = 0; i < ranks.size(); ++i) {
      const size_t length = LengthAt(bundle, i);
      const Slices::Slice& slice = from[ranks[i]];
      if (length > slice.bytes || place + length > bundle.size()) return damaged(ranks[i]);
      if (length != 0) memcpy(slice.data, bundle.data() + place, length);
      place += length;
    }
  }
  return Status();
}

}  // namespace dynemb
