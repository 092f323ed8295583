#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <vector>

namespace weir {

/// Who of several is responsible for a key: highest random weight (rendezvous) hashing. When one
/// candidate goes, only its keys move; when one comes, it takes its share from all alike. Integers
/// only, so that every machine that has the same candidates finds the same order.

/// FNV-1a with a finisher of SplitMix64: stable across machines and versions. Not keyed: who can
/// choose keys can choose whose they are.
constexpr std::uint64_t stable_hash(std::string_view text, std::uint64_t seed = 0) {
  std::uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

/// The score of a candidate for a key: the best of `weight` draws, so that a candidate is first for
/// a share of all keys in proportion to its weight. 0 never comes first among others.
constexpr std::uint64_t rendezvous_score(std::string_view candidate, std::uint64_t key,
                                         unsigned weight = 1) {
  std::uint64_t best = 0;
  std::uint64_t name = stable_hash(candidate);
  for (std::uint64_t draw = 0; draw < weight; ++draw) {
    std::uint64_t mixed = name ^ (key + 0x9e3779b97f4a7c15u * (draw + 1));
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    best = std::max(best, mixed ^ (mixed >> 31));
  }
  return best;
}

/// Indices of `names`, the first choice for `key` first. Equal scores go by name.
template <typename Names>
std::vector<std::size_t> rendezvous_order(const Names& names, std::uint64_t key) {
  std::vector<std::size_t> order(names.size());
  std::vector<std::uint64_t> scores;
  for (const auto& name : names) scores.push_back(rendezvous_score(name, key));
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : names[a] < names[b];
  });
  return order;
}

}  // namespace weir
