// GlooWire: a Wire over Gloo's TCP transport, with a connection between every two ranks.
//
// The group forms in two steps, between which the caller gives the addresses of each rank to all
// others by any means (tf_dynemb's rendezvous).
//
// Failure. Gloo says which connection is closed, and not why. A rank that gives up therefore sends
// its reason to all others, and then closes its connections; those that see them close report that
// reason. Any rank thereby names the one that is at fault, and not its neighbour that noticed.
#ifndef DYNEMB_RANKS_GLOO_WIRE_H_
#define DYNEMB_RANKS_GLOO_WIRE_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/ranks/wire.h"

namespace dynemb {

class GlooWire : public Wire {
 public:
  // Listens at `host`, a name or an address of this machine by which the other ranks can reach it.
  // Internal says what the system refuses.
  static Status Listen(int rank, int size, const std::string& host,
                       std::chrono::milliseconds timeout, std::unique_ptr<GlooWire>* wire);
  ~GlooWire() override;

  // The address that each rank connects to, by its number; that of this rank itself is "".
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Connects to the others. addresses[r] is what rank r has for this rank in its addresses().
  Status Connect(const std::vector<std::string>& addresses);

  Status Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                  const Slices& from) override;
  // Returns the first failure of the wire, which is this one if there was none.
  Status Fail(const std::string& reason) override;

 private:
  class Buffer;
  class Mesh;
  struct Transfer;

  GlooWire(int rank, int size, std::chrono::milliseconds timeout);

  // The same when a connection has closed: prefers the reason that its other end has sent.
  Status FailClosed(int rank, const std::string& operation);
  void Tell(const std::string& reason);
  std::string On(const std::string& operation) const;

  std::unique_ptr<Mesh> mesh_;
  std::vector<std::string> addresses_;
  std::string heard_text_;         // the memory of heard_
  std::unique_ptr<Buffer> heard_;  // receives the first reason that another rank sends

  std::mutex mutex_;
  Status failure_;  // guarded by mutex_
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_GLOO_WIRE_H_
