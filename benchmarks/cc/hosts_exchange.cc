// One of several ranks that exchange slices of equal lengths, in three ways, in turns: by TCP
// between every two of them; with memory between those of one host; and with forwarding as well
// (cc/ranks/hosts_wire.h). benchmarks/hosts.py starts them.
//
//   hosts_exchange RANK SIZE HOST ADDRESS FOLDER ROUNDS BYTES...
//
// HOST names the host, ADDRESS is where this rank listens, and FOLDER is where all ranks meet. Rank
// 0 prints a line for each number of bytes: the microseconds of an exchange in each way, the median
// over rounds of the slowest rank's mean; the processor time of all ranks in each way, the median
// over rounds; then the messages and bytes that rank 0 has sent to other
// hosts in one flat and in one forwarded exchange.
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/ranks/gloo_wire.h"
#include "cc/ranks/hosts_wire.h"

namespace dynemb {
namespace {

using Clock = std::chrono::steady_clock;

void Check(const Status& status) {
  if (status.ok()) return;
  fprintf(stderr, "%s\n", status.message().c_str());
  exit(1);
}

// Microseconds of this process on processors.
double Worked() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

// Where ranks meet: each leaves lines of text in a file, by its number.
class Folder {
 public:
  Folder(std::string path, int rank, int size) : path_(std::move(path)), rank_(rank), size_(size) {}

  // What each rank has left under this name. Collective.
  std::vector<std::string> Gather(const std::string& name, const std::string& own) const {
    const auto file = [&](int r) { return path_ + "/" + name + "." + std::to_string(r); };
    std::ofstream(file(rank_) + ".partial", std::ios::binary) << own;
    if (rename((file(rank_) + ".partial").c_str(), file(rank_).c_str()) != 0) exit(1);
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) {
      std::ifstream in(file(r), std::ios::binary);
      while (!in) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        in.open(file(r), std::ios::binary);
      }
      all.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    }
    return all;
  }

 private:
  const std::string path_;
  const int rank_, size_;
};

std::unique_ptr<GlooWire> Connect(const Folder& folder, const std::string& name, int rank, int size,
                                  const std::string& address) {
  std::unique_ptr<GlooWire> wire;
  Check(GlooWire::Listen(rank, size, address, std::chrono::seconds(60), nullptr, &wire));
  // Addresses have one length, or none.
  std::string own;
  size_t length = 0;
  for (const std::string& each : wire->addresses()) length = std::max(length, each.size());
  for (std::string each : wire->addresses()) {
    each.resize(length);
    own += each;
  }
  std::vector<std::string> addresses;
  for (const std::string& of_rank : folder.Gather(name, own)) {
    addresses.push_back(of_rank.substr(static_cast<size_t>(rank) * length, length));
  }
  Check(wire->Connect(addresses));
  return wire;
}

void Run(int argc, char** argv) {
  const int rank = atoi(argv[1]), size = atoi(argv[2]), rounds = atoi(argv[6]);
  const Folder folder(argv[5], rank, size);
  const std::vector<std::string> hosts = folder.Gather("host", argv[3]);
  const std::unique_ptr<Wire> tcp = Connect(folder, "tcp", rank, size, argv[4]);
  std::unique_ptr<Wire> joined;
  Check(HostsWire::Join(Connect(folder, "hosts", rank, size, argv[4]), hosts, &joined));
  auto* const by_host = dynamic_cast<HostsWire*>(joined.get());
  if (by_host == nullptr) exit(1);
  for (int argument = 7; argument < argc; ++argument) {
    const auto bytes = static_cast<size_t>(atoll(argv[argument]));
    const size_t ranks = static_cast<size_t>(size);
    std::vector<char> sent(bytes * ranks, 'x'), received(bytes * ranks);
    Slices to(size), from(size);
    for (int r = 0; r < size; ++r) {
      to[r] = {sent.data() + static_cast<size_t>(r) * bytes, bytes};
      from[r] = {received.data() + static_cast<size_t>(r) * bytes, bytes};
    }
    // Slices that would not be forwarded otherwise are forwarded here, to find out from where on
    // that takes longer.
    const size_t most = std::min(bytes, size_t{64});
    const auto exchange = [&](int way) {
      Check(way == 0   ? tcp->Exchange(1, "tcp", to, from)
            : way == 1 ? by_host->Exchange(1, "memory", to, from)
                       : by_host->ExchangeAtMost(most, 1, "forwarded", to, from));
    };
    const size_t calls =
        std::max(size_t{2}, std::min(size_t{50}, (size_t{1} << 23) / (bytes * ranks)));
    std::vector<double> micros;
    HostsWire::Counts counts[3];
    for (int round = 0; round <= rounds; ++round) {  // the first one is not counted
      for (int turn = 0; turn < 3; ++turn) {
        const int way = (turn + round) % 3;
        exchange(0);  // all ranks begin together
        const HostsWire::Counts before = by_host->sent();
        const Clock::time_point begin = Clock::now();
        const double worked = Worked();
        for (size_t call = 0; call < calls; ++call) exchange(way);
        const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
        if (round == 0) continue;
        micros.push_back(took.count() / static_cast<double>(calls));
        micros.push_back((Worked() - worked) / static_cast<double>(calls));
        const HostsWire::Counts after = by_host->sent();
        const auto n = static_cast<int64_t>(calls);
        counts[way] = {(after.messages - before.messages) / n, (after.bytes - before.bytes) / n};
      }
    }
    std::vector<double> all(micros.size() * ranks);
    for (int r = 0; r < size; ++r) {
      to[r] = {reinterpret_cast<char*>(micros.data()), micros.size() * sizeof(double)};
      from[r] = {reinterpret_cast<char*>(all.data() + static_cast<size_t>(r) * micros.size()),
                 micros.size() * sizeof(double)};
    }
    Check(tcp->Exchange(2, "times", to, from));
    if (rank != 0) continue;
    // Of each way: the slowest rank's time, and the work of all ranks.
    std::vector<double> slowest[3], work[3];
    for (size_t i = 0; i < micros.size(); i += 2) {
      double most_time = 0, sum = 0;
      for (size_t r = 0; r < ranks; ++r) {
        most_time = std::max(most_time, all[r * micros.size() + i]);
        sum += all[r * micros.size() + i + 1];
      }
      const size_t turn = i / 2, way = (turn % 3 + turn / 3 + 1) % 3;
      slowest[way].push_back(most_time);
      work[way].push_back(sum);
    }
    printf("%zu", bytes);
    for (auto* const of_ways : {&slowest, &work}) {
      for (std::vector<double>& of_way : *of_ways) {
        std::sort(of_way.begin(), of_way.end());
        printf(" %.1f", of_way[of_way.size() / 2]);
      }
    }
    for (const int way : {1, 2}) {
      printf(" %lld %lld", static_cast<long long>(counts[way].messages),
             static_cast<long long>(counts[way].bytes));
    }
    printf("\n");
    fflush(stdout);
  }
}

}  // namespace
}  // namespace dynemb

int main(int argc, char** argv) {
  if (argc < 8) {
    fprintf(stderr, "usage: hosts_exchange RANK SIZE HOST ADDRESS FOLDER ROUNDS BYTES...\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  dynemb::Run(argc, argv);
  return 0;
}
