// The adversary: which queued operation runs, and when.
#include "scheduler.h"

#include <chrono>
#include <stdexcept>
#include <thread>

namespace sim {

Scheduler& scheduler() {
  static Scheduler* one = new Scheduler;  // outlives every tensor
  return *one;
}

using Guard = std::lock_guard<std::recursive_mutex>;

void Scheduler::seed(uint64_t value) {
  Guard guard(lock);
  static const double early[] = {0, 0.05, 0.3, 1};
  static const double beside[] = {0, 0.3, 0.8};
  random_.seed(value);
  early_ = early[value % 4];
  beside_ = beside[value / 4 % 3];
  dawdles_ = (value ^ value / 4) & 1;
}

Queue& Scheduler::queue(int device, int64_t stream) {
  auto& found = queues_[{device, stream}];  // a map's elements stay where they are
  found.device = device;
  found.stream = stream;
  return found;
}

bool Scheduler::chance(double probability) {
  return probability > 0 && std::uniform_real_distribution<>(0, 1)(random_) < probability;
}

static std::string name_of(const Queue& queue) {
  return "sim:" + std::to_string(queue.device) + " stream " + std::to_string(queue.stream);
}

void Scheduler::push(int device, int64_t stream, std::string name, std::function<void()> run) {
  Guard guard(lock);
  auto& to = queue(device, stream);
  to.waiting.push_back({std::move(name), std::move(run), nullptr, nullptr});
  stray();
}

MarkPtr Scheduler::record(int device, int64_t stream) {
  Guard guard(lock);
  auto& to = queue(device, stream);
  auto mark = std::make_shared<Mark>(Mark{&to, to.waiting.empty()});
  if (!mark->done) to.waiting.push_back({"", nullptr, nullptr, mark});
  return mark;
}

void Scheduler::wait(int device, int64_t stream, MarkPtr mark) {
  Guard guard(lock);
  auto& to = queue(device, stream);
  if (!mark->done && mark->queue != &to) to.waiting.push_back({"", nullptr, std::move(mark), nullptr});
}

bool Scheduler::is_ready(const Queue& from) const {
  if (from.waiting.empty()) return false;
  auto& head = from.waiting.front();
  return !head.waits_for || head.waits_for->done;
}

void Scheduler::run_head(Queue& from) {
  auto operation = std::move(from.waiting.front());
  from.waiting.pop_front();
  if (operation.run) {
    ++executed[operation.name];
    try {
      if (!failing_.empty() && operation.name.find(failing_) != std::string::npos) {
        failing_.clear();
        throw std::runtime_error("made to fail");
      }
      operation.run();
    } catch (const std::exception& error) {
      std::string what = error.what();
      what = what.substr(0, what.find("\nException raised"));  // torch appends its own frames
      if (error_.empty()) error_ = name_of(from) + ": " + operation.name + ": " + what;
    }
  }
  if (operation.reached) operation.reached->done = true;
}

// Run what must run next, that a queue gets on. A mark is older than who waits for it, so this ends.
void Scheduler::run_towards(Queue& from) {
  auto* next = &from;
  while (!is_ready(*next)) next = next->waiting.front().waits_for->queue;
  run_head(*next);
}

bool Scheduler::run_any() {
  std::vector<Queue*> ready;
  for (auto& [_, each] : queues_)
    if (is_ready(each)) ready.push_back(&each);
  if (ready.empty()) return false;
  run_head(*ready[random_() % ready.size()]);
  return true;
}

void Scheduler::stray() {
  while (chance(early_) && run_any()) {
  }
}

void Scheduler::raise_error() {
  if (error_.empty()) return;
  auto message = std::move(error_);
  error_.clear();
  throw std::runtime_error(message);
}

void Scheduler::finish(const MarkPtr& mark, const std::string& why) {
  // What an event waits for takes time on a device; meanwhile other threads go on.
  if (dawdles_ && why == "event.synchronize") std::this_thread::sleep_for(std::chrono::milliseconds(3));
  Guard guard(lock);
  ++host_waits[why];
  while (!mark->done) {
    if (chance(beside_)) run_any();
    if (!mark->done) run_towards(*mark->queue);
  }
  raise_error();
}

void Scheduler::finish_device(int device, const std::string& why) {
  Guard guard(lock);
  ++host_waits[why];
  for (bool more = true; more;) {
    more = false;
    for (auto& [_, each] : queues_) {
      if (each.device != device || each.waiting.empty()) continue;
      run_towards(each);
      more = true;
    }
  }
  raise_error();
}

bool Scheduler::is_done(const MarkPtr& mark) {
  Guard guard(lock);
  if (!mark->done && chance(0.5)) run_towards(*mark->queue);  // who polls for ever gets there
  return mark->done;
}

bool Scheduler::is_empty(int device, int64_t stream) {
  Guard guard(lock);
  auto& from = queue(device, stream);
  if (!from.waiting.empty() && chance(0.5)) run_towards(from);
  return from.waiting.empty();
}

void Scheduler::fail_next(std::string name) {
  Guard guard(lock);
  failing_ = std::move(name);
}

}  // namespace sim
