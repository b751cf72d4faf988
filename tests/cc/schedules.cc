#include "tests/cc/schedules.h"

#include <cstdio>
#include <cstdlib>

namespace dynemb {
namespace testing_schedules {

Schedules* Schedules::running = nullptr;

void Schedules::RunThread() {
  Schedules* const all = running;
  const size_t thread = all->current_;
  all->threads_[thread]();
  // Others may run before the last delayed writes take effect.
  if (!all->delayed_.empty()) all->BeforeAccess(nullptr);
  all->fibers_[thread].ended = true;
  swapcontext(&all->fibers_[thread].context, &all->scheduler_);
}

std::string Schedules::Explore() {
  choices_.clear();
  for (;;) {
    RunOnce();
    ++runs_;
    const std::string wrong = check_();
    if (!wrong.empty()) {
      std::string schedule = wrong + "; run " + std::to_string(runs_) + ", choices";
      for (const Choice& choice : choices_) schedule += " " + std::to_string(choice.taken);
      return schedule;
    }
    while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().options) {
      choices_.pop_back();
    }
    if (choices_.empty()) return "";
    ++choices_.back().taken;
  }
}

void Schedules::RunOnce() {
  running = this;
  next_choice_ = deviations_ = accesses_ = 0;
  delayed_.clear();
  threads_ = begin_();
  fibers_.resize(threads_.size());
  for (Fiber& fiber : fibers_) {
    fiber.ended = false;
    if (fiber.stack == nullptr) fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, RunThread, 0);
  }
  current_ = threads_.size();
  for (std::vector<size_t> left; !(left = OtherThreads()).empty();) {
    current_ = left[Choose(left.size(), /*is_deviation=*/false)];
    swapcontext(&scheduler_, &fibers_[current_].context);
  }
}

std::vector<size_t> Schedules::OtherThreads() const {
  std::vector<size_t> others;
  for (size_t t = 0; t < fibers_.size(); ++t) {
    if (t != current_ && !fibers_[t].ended) others.push_back(t);
  }
  return others;
}

size_t Schedules::Choose(size_t options, bool is_deviation) {
  if (is_deviation && deviations_ == most_deviations_) options = 1;
  if (options == 1) return 0;
  if (next_choice_ == choices_.size()) choices_.push_back({0, options});
  const size_t taken = choices_[next_choice_++].taken;
  deviations_ += is_deviation && taken != 0;
  return taken;
}

void Schedules::BeforeAccess(const void* word) {
  if (++accesses_ > kMostAccesses) {
    std::fprintf(stderr, "a schedule does not end\n");
    std::abort();
  }
  if (deviations_ < most_deviations_) {
    const std::vector<size_t> others = OtherThreads();
    const size_t taken = Choose(1 + others.size(), /*is_deviation=*/true);
    if (taken != 0) {
      const size_t from = current_;
      current_ = others[taken - 1];
      swapcontext(&fibers_[from].context, &fibers_[current_].context);
      // The thread that has switched back has set current_.
    }
  }
  Commit(current_, word);
}

void Schedules::BeforeWrite(uint32_t* word, const std::function<void()>& write) {
  BeforeAccess(word);
  if (Choose(2, /*is_deviation=*/true) == 0) return write();
  delayed_.push_back({current_, word, write});
}

// word == nullptr: all words.
void Schedules::Commit(size_t thread, const void* word) {
  if (delayed_.empty()) return;
  std::vector<Delayed> left;
  for (Delayed& delayed : delayed_) {
    if (delayed.thread == thread && (word == nullptr || delayed.word == word)) {
      delayed.write();
    } else {
      left.push_back(std::move(delayed));
    }
  }
  delayed_ = std::move(left);
}

}  // namespace testing_schedules
}  // namespace dynemb
