// HostsWire: a Wire over Gloo whose ranks of one host exchange by memory that they share.
//
// Between ranks of one host, all bytes go through SharedRings. Between hosts there are two ways:
//
//   flat        each rank exchanges with each rank of the other hosts. Every byte crosses once.
//   forwarded   first, each rank gives rank l of its host, by memory, what is for the ranks with
//               the local number l of all hosts. Then rank l sends each of them one message,
//               with the slices of all ranks of its host. With N hosts of L ranks, a rank sends
//               N - 1 messages over the network, which are L times as long, and not (N - 1) L.
//
//     host 0     rank 0 -- memory -- rank 1          0 gives 1 what is for 1 and 3
//                   |                   |
//                network             network         1 sends 3 what 0 and 1 have for 3
//                   |                   |
//     host 1     rank 2 -- memory -- rank 3
//
// Forwarding saves the fixed costs of messages, and copies each byte twice more. It is therefore
// for exchanges of small slices: those of ExchangeAtMost whose bound, which all ranks know, makes a
// small message of those of a host. All other exchanges are flat. If hosts have different numbers
// of ranks, rank m of a host receives from rank m mod L of a host with L ranks.
//
// Every two ranks stay connected by Gloo: flat exchanges use the connections, and by them a rank
// learns that another one has ended, or why it has given up, also one of the same host.
//
// Failure is that of GlooWire. Of ranks that wait for each other, the one that waits for the rank
// at fault must be the first to give up, because its reason becomes that of all. After the timeout,
// a rank therefore names only ranks of the same host that do not wait for other hosts, and ranks of
// other hosts in a flat exchange. It waits two seconds longer for forwarded messages, and two more
// for ranks of the same host that do wait for other hosts. Those show it by their beats, so that
// one that is stopped while it waits does not pass for one that waits.
#ifndef DYNEMB_RANKS_HOSTS_WIRE_H_
#define DYNEMB_RANKS_HOSTS_WIRE_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cc/ranks/gloo_wire.h"
#include "cc/ranks/shared_rings.h"
#include "cc/ranks/wire.h"

namespace dynemb {

class HostsWire : public Wire {
 public:
  // Makes a wire of `gloo`, which is connected; it is `gloo` itself if no rank can share memory
  // with another one. hosts[r] is the name of the machine of rank r. If ranks of a name cannot all
  // open the memory of the first one, as in containers, each of them counts as a host.
  // Collective.
  static Status Join(std::unique_ptr<GlooWire> gloo, const std::vector<std::string>& hosts,
                     std::unique_ptr<Wire>* wire);

  Status Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                  const Slices& from) override;
  Status ExchangeAtMost(size_t most, uint64_t tag, const std::string& operation, const Slices& to,
                        const Slices& from) override;
  Status Look(std::vector<bool>* ended) override;
  Status Fail(const std::string& reason) override;

  // The most bytes of a forwarded message, by the bound of its slices. All announcements of a Group
  // (64 KiB for all ranks) are forwarded, unless hosts have more than 50 ranks.
  static constexpr size_t kMostForwarded = size_t{36} << 10;

  // What this rank has sent to ranks of other hosts.
  struct Counts {
    int64_t messages = 0, bytes = 0;
  };
  Counts sent() const { return {messages_.load(), bytes_.load()}; }

 private:
  class Waiting;
  // The messages that Gloo sends and receives for a forwarded exchange.
  struct Bundles {
    std::vector<std::string> to, from;
  };

  HostsWire(std::unique_ptr<GlooWire> gloo, std::vector<std::vector<int>> hosts,
            std::unique_ptr<SharedRings> rings);

  Status Flat(uint64_t tag, const std::string& operation, const Slices& to, const Slices& from);
  Status Forwarded(uint64_t tag, const std::string& operation, const Slices& to,
                   const Slices& from);
  // Sends and receives by memory.
  Status Share(uint64_t tag, const std::string& operation, std::vector<SharedRings::Outgoing>* out,
               std::vector<SharedRings::Incoming>* in);
  Status GiveToForwarders(uint64_t tag, const std::string& operation, const Slices& to,
                          std::vector<std::string>* given);
  // Runs f as an exchange: whatever it fails with is the failure of the wire.
  template <class F>
  Status Run(const std::string& operation, const F& f);
  void Count(const Slices& to);
  bool is_here(int rank) const { return host_of_[static_cast<size_t>(rank)] == host_; }
  // The rank of a host that sends to ranks with the local number `local`.
  int ForwarderOf(size_t host, size_t local) const {
    return hosts_[host][local % hosts_[host].size()];
  }

  const std::unique_ptr<GlooWire> gloo_;
  const std::vector<std::vector<int>> hosts_;  // the ranks of each
  const std::unique_ptr<SharedRings> rings_;   // null if this rank is alone on its host
  std::vector<size_t> host_of_;                // of each rank
  size_t host_, local_, most_ranks_;           // this rank's host and number there; of any host
  // targets_[l]: the ranks of other hosts to which rank l of this host sends.
  std::vector<std::vector<int>> targets_;
  std::atomic<int64_t> messages_{0}, bytes_{0};
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_HOSTS_WIRE_H_
