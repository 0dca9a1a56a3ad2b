//! A long list read by several threads. To read a file is mostly to wait for memory that only the kernel looks at, so that
//! two processors take half the time.
//!
//! What comes out does not depend on how many threads there were: the list is cut at fixed places, and what each part gives is
//! put together in order.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::sysfs::tree::Tree;

/// Entries that are read one after the other. Most hosts have fewer than that and are read by one thread.
const PART: usize = 256;
/// Most threads of one reader.
const MAX_THREADS: usize = 4;

/// What a part gave, and the place of the part.
struct Done<R> {
    place: usize,
    read: Vec<R>,
    warnings: Vec<String>,
}

/// What `read` makes of each part of a list, one after the other. Neighbours that belong together are in one part.
pub(super) fn by_parts<T: Sync, R: Send>(
    tree: &Tree,
    list: &[T],
    belong_together: impl Fn(&T, &T) -> bool,
    read: impl Fn(&Tree, &[T]) -> Vec<R> + Sync,
) -> Vec<R> {
    let parts = parts(list, belong_together);
    if parts.len() < 2 {
        return read(tree, list);
    }
    let before = tree.take_warnings();
    let next = AtomicUsize::new(0);
    let work = |tree: &Tree| {
        let mut done = Vec::new();
        loop {
            // Relaxed: only the number counts, and each is given once.
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(part) = parts.get(place) else { return done };
            let read = read(tree, part);
            done.push(Done { place, read, warnings: tree.take_warnings() });
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS).min(parts.len());
    let mut done: Vec<Done<R>> = thread::scope(|scope| {
        let helper = |_| {
            let own = tree.another()?;
            let work = &work;
            // Without the thread the others do its work.
            thread::Builder::new().spawn_scoped(scope, move || (work(&own), own.asked())).ok()
        };
        let helpers: Vec<_> = (1..threads).map_while(helper).collect();
        let mut done = work(tree);
        for helper in helpers {
            let (theirs, asked) = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done.extend(theirs);
            tree.count(asked);
        }
        done
    });
    done.sort_unstable_by_key(|done| done.place);
    let mut all = Vec::with_capacity(list.len());
    tree.put_warnings(before);
    for Done { read, warnings, .. } in done {
        all.extend(read);
        tree.put_warnings(warnings);
    }
    all
}

fn parts<T>(mut list: &[T], belong_together: impl Fn(&T, &T) -> bool) -> Vec<&[T]> {
    let mut parts = Vec::with_capacity(list.len() / PART + 1);
    while !list.is_empty() {
        let least = PART.min(list.len());
        let more = list[least - 1..].windows(2).take_while(|pair| belong_together(&pair[0], &pair[1])).count();
        let (part, rest) = list.split_at(least + more);
        parts.push(part);
        list = rest;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_out_is_in_order_whoever_read_it() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("sys/devices")).unwrap();
        for entries in [0, 1, PART, PART + 1, 7 * PART + 3] {
            let list: Vec<usize> = (0..entries).collect();
            let tree = Tree::open(folder.path()).unwrap();
            tree.warn("before", "first");
            let read = by_parts(
                &tree,
                &list,
                |_, _| false,
                |tree, part| {
                    tree.warn("part", part.first().copied().unwrap_or_default());
                    part.to_vec()
                },
            );
            assert_eq!(read, list);
            let parts = (0..entries.div_ceil(PART).max(1)).map(|part| format!("part: {}", part * PART));
            let expected: Vec<String> = std::iter::once("before: first".to_owned()).chain(parts).collect();
            assert_eq!(tree.take_warnings(), expected);
        }
    }

    #[test]
    fn what_belongs_together_is_not_cut() {
        let list: Vec<usize> = (0..3 * PART + 5).collect();
        let parts = parts(&list, |a, b| a / 10 == b / 10);
        assert!(parts.iter().all(|part| part[0] % 10 == 0 && part.len() >= PART || part.last() == list.last()));
        assert_eq!(parts.concat(), list);
    }
}
