#include <weir/crdt/bucket_queue.h>

#include <weir/crdt/packed_cell.h>

namespace weir::crdt {

void BucketQueue::put(RecordRef bucket, Nanos end) {
  auto [at, added] = due_.try_emplace(end / kSecond + 1, 0);
  if (added) {
    at->second = arena_.allocate(sizeof(PackedHead));
    head_of(arena_.at(at->second)) = {};
  }
  PackedHead& first = head_of(arena_.at(at->second));
  PackedHead& head = head_of(arena_.at(bucket));
  head.before = at->second;
  head.behind = first.behind;
  if (first.behind != 0) head_of(arena_.at(first.behind)).before = bucket;
  first.behind = bucket;
}

RecordRef BucketQueue::take(Nanos floor) {
  auto first = due_.begin();
  if (first == due_.end() || first->first > floor / kSecond) return 0;
  PackedHead& list = head_of(arena_.at(first->second));
  RecordRef bucket = list.behind;
  list.behind = head_of(arena_.at(bucket)).behind;
  if (list.behind != 0) {
    head_of(arena_.at(list.behind)).before = first->second;
  } else {
    arena_.free(first->second);
    due_.erase(first);
  }
  return bucket;
}

void BucketQueue::moved(RecordRef to) {
  const PackedHead& head = head_of(arena_.at(to));
  head_of(arena_.at(head.before)).behind = to;
  if (head.behind != 0) head_of(arena_.at(head.behind)).before = to;
}

}  // namespace weir::crdt
