// Gloo's transport over TCP, with TLS on each connection.
//
// Gloo has such a transport (gloo/transport/tcp/tls), which cannot be used. Its write repeats what
// the socket does not take, with the lock of the connection: two ranks that both send more than
// sockets hold wait for each other without end. It does not tell that the other end has closed the
// connection, and a connection that closes before its handshake has begun ends the process.
#ifndef DYNEMB_RANKS_TLS_TRANSPORT_H_
#define DYNEMB_RANKS_TLS_TRANSPORT_H_

#include <memory>

#include "cc/ranks/tls.h"
#include "gloo/transport/context.h"
#include "gloo/transport/device.h"

namespace dynemb {

// Makes a context of a device of Gloo's transport over TCP. Its connections are used after the
// handshake only: Pair::connect returns when that is done on this side, and throws if it fails, or
// takes longer than five times the context's timeout.
std::shared_ptr<gloo::transport::Context> MakeTlsContext(
    const std::shared_ptr<gloo::transport::Device>& device, int rank, int size,
    std::shared_ptr<const Tls> tls);

}  // namespace dynemb

#endif  // DYNEMB_RANKS_TLS_TRANSPORT_H_
