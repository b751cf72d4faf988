// A network between namespaces, by TUN devices: each packet arrives after a delay.
//
//   delayed_link MICROSECONDS NAMESPACE...
//
// Makes a device "link" in each network namespace (of /run/netns), prints "ready", and passes on
// packets until it is ended: those for an address a.b.c.N of IPv4 to namespace number N, from 1.
// The caller gives each device its address. All packets go through one thread of this
// process: the link is no model of bandwidth.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

int OpenDevice(const std::string& space) {
  const int net = open(("/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC);
  if (net < 0 || setns(net, CLONE_NEWNET) != 0) {
    perror(space.c_str());
    exit(1);
  }
  close(net);
  const int device = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  ifreq request{};
  strncpy(request.ifr_name, "link", IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (device < 0 || ioctl(device, TUNSETIFF, &request) != 0) {
    perror("/dev/net/tun");
    exit(1);
  }
  return device;
}

struct Packet {
  Clock::time_point due;
  int device;
  std::vector<char> bytes;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: delayed_link MICROSECONDS NAMESPACE...\n");
    return 2;
  }
  const std::chrono::microseconds delay(atoll(argv[1]));
  std::vector<pollfd> devices;
  for (int i = 2; i < argc; ++i) devices.push_back({OpenDevice(argv[i]), POLLIN, 0});
  // The timer is to be exact, and this process the first to run.
  prctl(PR_SET_TIMERSLACK, 1);
  (void)setpriority(PRIO_PROCESS, 0, -20);
  printf("ready\n");
  fflush(stdout);
  std::deque<Packet> waiting;  // in the order of their times
  std::vector<char> buffer(1 << 16);
  for (;;) {
    const Clock::time_point now = Clock::now();
    while (!waiting.empty() && waiting.front().due <= now) {
      const Packet& packet = waiting.front();
      // A device whose queue is full loses the packet, as networks do.
      if (write(packet.device, packet.bytes.data(), packet.bytes.size()) < 0) perror("write");
      waiting.pop_front();
    }
    timespec left{};
    if (!waiting.empty()) {
      const auto most =
          std::chrono::nanoseconds(std::max(Clock::duration{}, waiting.front().due - now));
      left.tv_nsec = static_cast<long>(most.count());
    }
    if (ppoll(devices.data(), devices.size(), waiting.empty() ? nullptr : &left, nullptr) <= 0) {
      continue;
    }
    for (const pollfd& from : devices) {
      if ((from.revents & POLLIN) == 0) continue;
      for (int i = 0; i < 16; ++i) {
        const ssize_t n = read(from.fd, buffer.data(), buffer.size());
        if (n < 20) break;
        const auto to = static_cast<size_t>(static_cast<unsigned char>(buffer[19]));
        if (buffer[0] >> 4 != 4 || to < 1 || to > devices.size()) continue;
        waiting.push_back(
            {Clock::now() + delay, devices[to - 1].fd, {buffer.begin(), buffer.begin() + n}});
      }
    }
  }
}
