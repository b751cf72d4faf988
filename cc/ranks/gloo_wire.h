// GlooWire: a Wire over Gloo's TCP transport, with a connection between every two ranks.
//
// The group forms in two steps, between which the caller gives the addresses of each rank to all
// others by any means (tf_dynemb's rendezvous). An address has a token, drawn for one other rank:
// whatever connects must show it before it is a rank, and a port accepts one connection. With TLS
// (tls.h) it shows a certificate before that.
//
// Failure. Gloo says which connection is closed, and not why. A rank that gives up therefore sends
// its reason to all others, and then closes its connections; those that see them close report that
// reason. Any rank thereby names the one that is at fault, and not its neighbour that noticed.
//
// Gloo does not tell a transfer that is under way when its connection closes. Each rank therefore
// always waits for a reason of each other one, which Gloo does tell, and an exchange looks at these
// ten times a second. A rank that has ended after it has sent all of an exchange is no failure of
// it.
//
// A child of fork shares the sockets, and has no thread for them: it must not use or close them.
#ifndef DYNEMB_RANKS_GLOO_WIRE_H_
#define DYNEMB_RANKS_GLOO_WIRE_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/ranks/tls.h"
#include "cc/ranks/wire.h"

namespace dynemb {

class GlooWire : public Wire {
 public:
  // Listens at `host`, a name or an address of this machine by which the other ranks can reach it.
  // The connections are encrypted if `tls` is not null; it must be so on all ranks. Internal says
  // what the system refuses.
  static Status Listen(int rank, int size, const std::string& host,
                       std::chrono::milliseconds timeout, std::shared_ptr<const Tls> tls,
                       std::unique_ptr<GlooWire>* wire);
  ~GlooWire() override;

  // The address that each rank connects to, by its number; "" for this rank.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Connects to the others. addresses[r] is what rank r has for this rank in its addresses().
  // Collective.
  Status Connect(const std::vector<std::string>& addresses);

  Status Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                  const Slices& from) override;
  Status Look(std::vector<bool>* ended) override;
  Status Fail(const std::string& reason) override;

  // The halves of Exchange, between which a wire that is made of this one brings other bytes. After
  // a failure, neither may follow. Finish waits for `longer` more than the timeout.
  class Begun;
  Status Begin(uint64_t tag, const std::string& operation, const Slices& to, const Slices& from,
               std::shared_ptr<Begun>* begun);
  Status Finish(const std::string& operation, const Begun& begun, std::chrono::milliseconds longer);

  // Is called ten times a second by each exchange that waits. Not to be set during one.
  void set_on_wait(std::function<void()> on_wait) { on_wait_ = std::move(on_wait); }

  // Fails the wire because a rank has ended: prefers the reason that it has sent.
  Status FailClosed(int rank, const std::string& operation);
  Status CheckProcess() const;                         // fails in a child of fork
  std::string On(const std::string& operation) const;  // "alltoall 'a' on rank 0: "

 private:
  class Buffer;
  class Mesh;
  struct Transfer;
  using Await = bool (Buffer::*)(std::chrono::steady_clock::time_point);

  GlooWire(int rank, int size, std::chrono::milliseconds timeout);

  void Tell(const std::string& reason);
  // Waits for transfers; `what` says in an error what a rank has not done.
  Status AwaitAll(const std::string& operation, const std::vector<Transfer>& transfers,
                  std::chrono::milliseconds longer, Await await, const char* what);
  // Fails if the wire has failed, if a rank has sent a reason, or if one has ended that has not
  // done its part of transfers[first] or a later one.
  Status LookAt(const std::string& operation, const std::vector<Transfer>& transfers, size_t first,
                Await await);

  std::unique_ptr<Mesh> mesh_;
  std::vector<std::string> addresses_;
  std::vector<std::string> reasons_;            // the memory of heard_
  std::vector<std::unique_ptr<Buffer>> heard_;  // receives the reason of each rank; null: itself
  const int process_;                           // its id
  std::function<void()> on_wait_;
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_GLOO_WIRE_H_
