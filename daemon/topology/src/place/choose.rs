//! Which sets of GPUs are looked at: all of them on ordinary hosts, those grown from each GPU on large ones.

use crate::place::score::Scorer;

/// Most sets that are enumerated; 8 GPUs have at most 70 of one size.
const MAX_ENUMERATED: usize = 4_096;

/// Sets of `size` free GPUs by place among them, each in rising order.
pub(super) fn candidate_sets(scorer: &Scorer<'_>, size: usize) -> Vec<Vec<usize>> {
    let free = scorer.gpus();
    if combinations(free, size).is_some_and(|count| count <= MAX_ENUMERATED) {
        return all_sets(free, size);
    }
    let mut grown: Vec<Vec<usize>> = (0..free).map(|seed| grow(scorer, seed, size)).collect();
    grown.sort_unstable();
    grown.dedup();
    grown
}

/// Number of ways to take `size` of `from`; `None` beyond what is enumerated anyway.
fn combinations(from: usize, size: usize) -> Option<usize> {
    let mut count: usize = 1;
    for taken in 0..size.min(from - size.min(from)) {
        count = count.checked_mul(from - taken)? / (taken + 1);
        if count > MAX_ENUMERATED {
            return None;
        }
    }
    Some(count)
}

fn all_sets(from: usize, size: usize) -> Vec<Vec<usize>> {
    let mut sets = Vec::new();
    let mut set: Vec<usize> = (0..size).collect();
    loop {
        sets.push(set.clone());
        let movable = (0..size).rev().find(|place| set.get(*place).is_some_and(|at| *at < from - size + place));
        let Some(place) = movable else { return sets };
        let start = set.get(place).map_or(0, |at| at + 1);
        for (offset, at) in set.iter_mut().skip(place).enumerate() {
            *at = start + offset;
        }
    }
}

/// Adds to a GPU, one by one, the one nearest to those already taken.
fn grow(scorer: &Scorer<'_>, seed: usize, size: usize) -> Vec<usize> {
    let mut set = vec![seed];
    let mut distance: Vec<f64> = (0..scorer.gpus()).map(|gpu| scorer.gpu_cost(seed, gpu)).collect();
    while set.len() < size {
        let open = distance.iter().enumerate().filter(|(gpu, _)| !set.contains(gpu));
        let Some((next, _)) = open.min_by(|a, b| a.1.total_cmp(b.1).then(a.0.cmp(&b.0))) else { break };
        set.push(next);
        for (gpu, sum) in distance.iter_mut().enumerate() {
            *sum += scorer.gpu_cost(next, gpu);
        }
    }
    set.sort_unstable();
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sets_are_listed_once() {
        for (from, size, count) in [(8, 1, 8), (8, 4, 70), (8, 8, 1), (5, 2, 10)] {
            let sets = all_sets(from, size);
            assert_eq!(sets.len(), count);
            assert_eq!(combinations(from, size), Some(count));
            assert!(sets.is_sorted() && sets.iter().all(|set| set.is_sorted() && set.len() == size));
        }
        assert_eq!(combinations(72, 8), None);
        assert_eq!(combinations(72, 72), Some(1));
    }
}
