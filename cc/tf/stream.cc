#include <memory>

#include "cc/device/stream_exec.h"
#include "cc/tf/place.h"

namespace dynemb {

Status ExecOfStream(CUstream_st* stream, std::unique_ptr<Exec>* exec) {
  return StreamExec::Make(stream, exec);
}

}  // namespace dynemb
