//! A tree held in memory, as unpacked from an archive. Links are followed here and cannot lead out of it.

use std::collections::BTreeMap;
use std::io;

use crate::sysfs::tree::At;

/// Most files, folders and links.
pub(super) const MAX_NODES: usize = 1 << 17;
/// Most bytes of file contents, names and links, together.
pub(super) const MAX_HELD_BYTES: usize = 12 << 20;
/// Most links followed on one path.
const MAX_LINKS: usize = 40;
/// Most folders above the one that holds `sys/`.
const MAX_ROOT_DEPTH: usize = 6;

/// Place of a node in [`Memory::nodes`].
type Id = usize;

#[derive(Debug)]
enum Node {
    Folder(BTreeMap<Box<str>, Id>),
    File(Box<[u8]>),
    Link(Box<str>),
}

/// The tree. Paths are relative to its root.
#[derive(Debug)]
pub(super) struct Memory {
    nodes: Vec<Node>,
    root: Id,
    held_bytes: usize,
}

/// What cannot be taken into the tree.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum BadEntry {
    #[error("lies below something that is no folder")]
    BelowNoFolder,
    #[error("is one of more than {MAX_NODES} files, folders and links")]
    TooMany,
    #[error("is more than the {MAX_HELD_BYTES} bytes that are held of a tree")]
    TooLarge,
}

impl Memory {
    pub(super) fn new() -> Self {
        Self { nodes: vec![Node::Folder(BTreeMap::new())], root: 0, held_bytes: 0 }
    }

    pub(super) fn add_folder(&mut self, path: &[&str]) -> Result<(), BadEntry> {
        let mut at = self.root;
        for part in path {
            at = self.child(at, part, || Node::Folder(BTreeMap::new()))?;
        }
        matches!(self.nodes.get(at), Some(Node::Folder(_))).then_some(()).ok_or(BadEntry::BelowNoFolder)
    }

    /// The last one of a name counts, as with tar itself.
    pub(super) fn add_file(&mut self, path: &[&str], bytes: &[u8]) -> Result<(), BadEntry> {
        self.hold(bytes.len())?;
        self.add(path, Node::File(bytes.into()))
    }

    pub(super) fn add_link(&mut self, path: &[&str], target: &str) -> Result<(), BadEntry> {
        self.hold(target.len())?;
        self.add(path, Node::Link(target.into()))
    }

    /// Contents of the file that was added under a path.
    pub(super) fn file(&self, path: &[&str]) -> Option<&[u8]> {
        let mut at = self.root;
        for part in path {
            let Some(Node::Folder(children)) = self.nodes.get(at) else { return None };
            at = *children.get(*part)?;
        }
        match self.nodes.get(at)? {
            Node::File(bytes) => Some(bytes),
            Node::Folder(_) | Node::Link(_) => None,
        }
    }

    fn hold(&mut self, bytes: usize) -> Result<(), BadEntry> {
        self.held_bytes = self.held_bytes.saturating_add(bytes);
        if self.held_bytes > MAX_HELD_BYTES { Err(BadEntry::TooLarge) } else { Ok(()) }
    }

    fn add(&mut self, path: &[&str], node: Node) -> Result<(), BadEntry> {
        let Some((name, above)) = path.split_last() else { return Ok(()) };
        self.add_folder(above)?;
        let mut at = self.root;
        for part in above {
            at = self.child(at, part, || Node::Folder(BTreeMap::new()))?;
        }
        let mut node = Some(node);
        let id = self.child(at, name, || node.take().unwrap_or(Node::Folder(BTreeMap::new())))?;
        if let (Some(node), Some(place)) = (node, self.nodes.get_mut(id)) {
            *place = node;
        }
        Ok(())
    }

    /// The child of a name, made if it is not there.
    fn child(&mut self, at: Id, name: &str, make: impl FnOnce() -> Node) -> Result<Id, BadEntry> {
        let next = self.nodes.len();
        let Some(Node::Folder(children)) = self.nodes.get_mut(at) else { return Err(BadEntry::BelowNoFolder) };
        if let Some(known) = children.get(name) {
            return Ok(*known);
        }
        if next >= MAX_NODES {
            return Err(BadEntry::TooMany);
        }
        children.insert(name.into(), next);
        self.nodes.push(make());
        self.hold(name.len())?;
        Ok(next)
    }

    /// Makes the folder nearest to the top that holds `sys/` the root, or that holds what `sys/` holds.
    /// Whether there is one.
    pub(super) fn settle_root(&mut self) -> bool {
        let mut level = vec![self.root];
        for _ in 0..=MAX_ROOT_DEPTH {
            let is_sys = |id: &Id| ["bus", "class", "devices"].iter().any(|name| self.folder(*id, name).is_some());
            let holder = level.iter().find(|id| self.folder(**id, "sys").is_some_and(|sys| is_sys(&sys)));
            if let Some(root) = holder.copied() {
                self.root = root;
                return true;
            }
            if let Some(sys) = level.iter().copied().find(|id| is_sys(id)) {
                let root = Node::Folder(BTreeMap::from([("sys".into(), sys)]));
                self.root = self.nodes.len();
                self.nodes.push(root);
                return true;
            }
            level = level.iter().flat_map(|id| self.folders(*id)).collect();
        }
        false
    }

    fn folders(&self, id: Id) -> Vec<Id> {
        let Some(Node::Folder(children)) = self.nodes.get(id) else { return Vec::new() };
        children.values().copied().filter(|child| matches!(self.nodes.get(*child), Some(Node::Folder(_)))).collect()
    }

    fn folder(&self, id: Id, name: &str) -> Option<Id> {
        let Some(Node::Folder(children)) = self.nodes.get(id) else { return None };
        let child = *children.get(name)?;
        matches!(self.nodes.get(child), Some(Node::Folder(_))).then_some(child)
    }

    /// Follows a path from the root, links on the way too, and at its end if `through_last`.
    fn resolve(&self, path: At<'_>, through_last: bool) -> io::Result<&Node> {
        let parts = path.name.split('/').rev().chain(path.folder.split('/').rev());
        let mut rest: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
        let mut above = vec![self.root];
        let mut links = 0;
        while let Some(part) = rest.pop() {
            let here = above.last().copied().unwrap_or(self.root);
            match part {
                "" | "." => continue,
                ".." => {
                    above.pop();
                    if above.is_empty() {
                        return Err(io::Error::other("links out of the tree, refused"));
                    }
                    continue;
                }
                _ => {}
            }
            let Some(Node::Folder(children)) = self.nodes.get(here) else {
                return Err(io::ErrorKind::NotADirectory.into());
            };
            let child = *children.get(part).ok_or(io::ErrorKind::NotFound)?;
            match self.nodes.get(child) {
                Some(Node::Link(target)) if through_last || !rest.is_empty() => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(io::Error::other("links in a ring"));
                    }
                    if target.starts_with('/') {
                        return Err(io::Error::other("links out of the tree, refused"));
                    }
                    rest.extend(target.split('/').rev());
                }
                _ => above.push(child),
            }
        }
        let last = above.last().copied().unwrap_or(self.root);
        self.nodes.get(last).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Puts the first `limit` bytes of a file into `bytes`.
    pub(super) fn read(&self, path: At<'_>, limit: usize, bytes: &mut Vec<u8>) -> io::Result<()> {
        match self.resolve(path, true)? {
            Node::File(held) => {
                bytes.clear();
                bytes.extend_from_slice(held.get(..limit).unwrap_or(held));
                Ok(())
            }
            Node::Folder(_) | Node::Link(_) => Err(io::Error::other("is no regular file")),
        }
    }

    /// The first `limit` names in a folder.
    pub(super) fn names(&self, path: &str, limit: usize) -> io::Result<Vec<Option<String>>> {
        match self.resolve(At::whole(path), true)? {
            Node::Folder(children) => Ok(children.keys().take(limit).map(|name| Some(name.to_string())).collect()),
            Node::File(_) | Node::Link(_) => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    pub(super) fn is_dir(&self, path: &str) -> bool {
        matches!(self.resolve(At::whole(path), true), Ok(Node::Folder(_)))
    }

    /// Puts the text of a link into `bytes`.
    pub(super) fn link(&self, path: At<'_>, bytes: &mut Vec<u8>) -> io::Result<()> {
        match self.resolve(path, false)? {
            Node::Link(target) => {
                bytes.clear();
                bytes.extend_from_slice(target.as_bytes());
                Ok(())
            }
            Node::Folder(_) | Node::File(_) => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Memory {
        let mut tree = Memory::new();
        tree.add_file(&["host", "sys", "devices", "a", "value"], b"7\n").unwrap();
        for (name, target) in [("inside", "a/../a"), ("up", "../../../etc"), ("absolute", "/etc"), ("ring", "ring")] {
            tree.add_link(&["host", "sys", "devices", name], target).unwrap();
        }
        tree.add_file(&["etc", "hostname"], b"x").unwrap();
        assert!(tree.settle_root());
        tree
    }

    #[test]
    fn links_are_followed_inside_the_root_alone() {
        let tree = tree();
        let bytes = |path, limit| {
            let mut bytes = Vec::new();
            tree.read(At::whole(path), limit, &mut bytes).map(|()| bytes)
        };
        assert_eq!(bytes("sys/devices/inside/value", 1).unwrap(), b"7");
        for path in ["sys/devices/up/hostname", "sys/devices/absolute/hostname", "sys/devices/ring", "../etc/hostname"]
        {
            assert_ne!(bytes(path, 9).unwrap_err().kind(), io::ErrorKind::NotFound, "{path}");
        }
        let mut link = Vec::new();
        tree.link(At { folder: "sys/devices", name: "up" }, &mut link).unwrap();
        assert_eq!(link, b"../../../etc");
        assert_eq!(tree.names("sys/devices", 2).unwrap().len(), 2);
        assert_eq!(bytes("sys/devices/b", 9).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(bytes("sys/devices/a/value/x", 9).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        assert!(tree.is_dir("sys/devices/inside") && !tree.is_dir("sys/devices/ring"));
    }

    #[test]
    fn nothing_is_added_below_a_link_or_beyond_the_bounds() {
        let mut tree = tree();
        let below = tree.add_file(&["sys", "devices", "up", "x"], b"");
        assert!(matches!(below, Err(BadEntry::BelowNoFolder)), "{below:?}");
        let large = tree.add_file(&["large"], &vec![0; MAX_HELD_BYTES]);
        assert!(matches!(large, Err(BadEntry::TooLarge)), "{large:?}");
    }

    #[test]
    fn the_last_file_of_a_name_counts() {
        let mut tree = tree();
        tree.add_file(&["sys", "devices", "a", "value"], b"8").unwrap();
        assert_eq!(tree.file(&["sys", "devices", "a", "value"]), Some(&b"8"[..]));
    }
}
