//! The file of a journal: read once at start, then appended to, and written anew when most of it is history.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::frame::{first_frame, frame_of, read};
use crate::core::{Journaled, Record};
use crate::state_file::{is_missing, read_state_file, write_new as write_new_file};

/// Longest journal that is read, bytes: 100,000 leases.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Length below which a journal is never written anew, bytes.
const LEAST_FOR_REWRITE_BYTES: u64 = 1 << 20;
/// Written anew at so many times the length that it had then.
const GROWTH_FOR_REWRITE: u64 = 4;
/// How long after one that could not be written the next is tried.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// The journal of this daemon. When it cannot be written it is removed, since none is better than one that is not so, and begun
/// anew later.
#[derive(Debug)]
pub(crate) struct JournalFile {
    path: PathBuf,
    file: Option<File>,
    len_bytes: u64,
    /// Length after it was written anew last.
    rewritten_bytes: u64,
    /// When it was last given up, while there is none.
    given_up: Option<Instant>,
}

impl JournalFile {
    /// What the daemon before left; nothing where there is no journal, or none that can be believed: then why is logged,
    /// and the file is put aside.
    pub(crate) fn read(path: &Path) -> Journaled {
        match read_state_file(path, MAX_FILE_BYTES) {
            Ok(None) => {}
            Ok(Some(bytes)) => match read(&bytes) {
                Ok(found) => {
                    if found.torn_bytes > 0 {
                        let (path, bytes) = (path.display(), found.torn_bytes);
                        tracing::info!(%path, bytes, "the journal's last record was cut off; it had no effect yet");
                    }
                    return found.journaled;
                }
                Err(error) => put_aside(path, &error),
            },
            Err(error) => put_aside(path, &error),
        }
        Journaled::default()
    }

    /// Starts a journal with these records.
    pub(crate) fn start(path: PathBuf, records: &[Record]) -> Self {
        let mut journal = Self { path, file: None, len_bytes: 0, rewritten_bytes: 0, given_up: None };
        journal.rewrite(records);
        journal
    }

    pub(crate) fn append(&mut self, record: &Record) {
        let Some(file) = &mut self.file else { return };
        let written = match frame_of(record) {
            Some(frame) => file.write_all(&frame).map(|()| frame.len() as u64),
            None => Err(io::Error::new(io::ErrorKind::InvalidInput, "a record is too long")),
        };
        match written {
            Ok(len_bytes) => self.len_bytes += len_bytes,
            Err(error) => self.give_up(&error),
        }
    }

    /// Whether it is to be written anew: it could not be written a while ago, most of it is history, or it comes near what the
    /// next daemon reads.
    pub(crate) fn is_due(&self) -> bool {
        self.given_up.map_or_else(|| self.is_long(), |since| since.elapsed() >= RETRY_AFTER)
    }

    /// Whether the next daemon will know all.
    pub(crate) fn is_kept(&self) -> bool {
        self.file.is_some()
    }

    fn is_long(&self) -> bool {
        let history = self.rewritten_bytes.saturating_mul(GROWTH_FOR_REWRITE).min(MAX_FILE_BYTES / 2);
        let most = history.max(self.rewritten_bytes + LEAST_FOR_REWRITE_BYTES);
        self.len_bytes > most
    }

    /// Whether somebody has deleted it.
    pub(crate) fn is_missing(&self) -> bool {
        self.file.is_some() && is_missing(&self.path)
    }

    /// Replaces it by these records, all at once.
    pub(crate) fn rewrite(&mut self, records: &[Record]) {
        match write_new(&self.path, records) {
            Ok((_, len_bytes)) if len_bytes > MAX_FILE_BYTES - 2 * LEAST_FOR_REWRITE_BYTES => {
                let what = format!("{len_bytes} bytes of it are more than the next daemon reads");
                self.give_up(&io::Error::new(io::ErrorKind::FileTooLarge, what));
            }
            Ok((file, len_bytes)) => {
                if self.given_up.take().is_some() {
                    tracing::info!(path = %self.path.display(), "the journal is kept again");
                }
                self.file = Some(file);
                (self.len_bytes, self.rewritten_bytes) = (len_bytes, len_bytes);
            }
            Err(error) => self.give_up(&error),
        }
    }

    fn give_up(&mut self, error: &io::Error) {
        let path = self.path.display();
        if self.given_up.is_none() {
            tracing::error!(%path, %error, "the journal cannot be written; until it can, a restart ends every session");
        }
        self.given_up = Some(Instant::now());
        self.file = None;
        // Gone already is as good; what stays is replaced at the next start.
        let _ = fs::remove_file(&self.path);
    }
}

/// Keeps a journal that is not believed, for a person to look at.
fn put_aside(path: &Path, error: &dyn std::error::Error) {
    let aside = path.with_extension("unreadable");
    let moved = fs::rename(path, &aside);
    let path = path.display();
    tracing::warn!(%path, %error, ?moved, "the journal is not believed: sessions and leases of the daemon before end");
}

fn write_new(path: &Path, records: &[Record]) -> io::Result<(File, u64)> {
    let new = path.with_extension("new");
    let mut bytes = Vec::new();
    for frame in std::iter::once(first_frame()).chain(records.iter().map(frame_of)) {
        bytes.extend(frame.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a record is too long"))?);
    }
    let file = write_new_file(&new, &bytes)?;
    fs::rename(&new, path)?;
    Ok((file, bytes.len() as u64))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::ids::LeaseId;
    use crate::state_file::MODE;

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gdrd.journal");
        (folder, path)
    }

    #[test]
    fn what_was_appended_is_read_and_nobody_else_can() {
        let (_folder, path) = folder();
        assert!(JournalFile::read(&path).is_empty());
        let mut journal = JournalFile::start(path.clone(), &[Record::Numbers(1)]);
        journal.append(&Record::Numbers(5));
        drop(journal);
        assert_eq!(JournalFile::read(&path).numbers, 5);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
    }

    #[test]
    fn a_journal_stays_within_a_few_times_what_it_must_hold() {
        let (_folder, path) = folder();
        let mut journal = JournalFile::start(path.clone(), &[]);
        for id in 0..100_000 {
            journal.append(&Record::LeaseGone(LeaseId(id)));
            if journal.is_long() {
                journal.rewrite(&[Record::Numbers(id)]);
            }
        }
        assert!(fs::metadata(&path).unwrap().len() <= LEAST_FOR_REWRITE_BYTES + 100);
        assert!(JournalFile::read(&path).numbers > 0);
    }

    #[test]
    fn a_journal_is_written_anew_before_it_is_longer_than_what_is_read() {
        let journal = |rewritten_bytes, len_bytes| JournalFile {
            path: PathBuf::new(),
            file: Some(tempfile::tempfile().unwrap()),
            len_bytes,
            rewritten_bytes,
            given_up: None,
        };
        assert!(!journal(8 << 20, 32 << 20).is_long());
        assert!(journal(20 << 20, (32 << 20) + 1).is_long());
        assert!(!journal(40 << 20, 41 << 20).is_long(), "what must be there is not written anew with each record");
        assert!(journal(40 << 20, (41 << 20) + 1).is_long());
    }

    #[test]
    fn a_journal_that_is_not_believed_is_put_aside() {
        let (_folder, path) = folder();
        drop(JournalFile::start(path.clone(), &[Record::Numbers(1), Record::Numbers(2)]));
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(JournalFile::read(&path), Journaled::default());
        assert_eq!(fs::read(path.with_extension("unreadable")).unwrap(), bytes);
        assert!(!path.exists());
    }

    #[test]
    fn a_journal_that_cannot_be_written_is_removed_and_begun_anew_later() {
        let (folder, path) = folder();
        let mut journal = JournalFile::start(path.clone(), &[Record::Numbers(1)]);
        fs::create_dir(path.with_extension("new")).unwrap();
        journal.rewrite(&[Record::Numbers(2)]);
        assert!(!path.exists());
        journal.append(&Record::Numbers(3));
        assert!(!path.exists() && !journal.is_kept() && !journal.is_due());
        fs::remove_dir(path.with_extension("new")).unwrap();
        journal.given_up = Instant::now().checked_sub(RETRY_AFTER);
        assert!(journal.is_due(), "it is tried again after a while");
        journal.rewrite(&[Record::Numbers(4)]);
        assert!(journal.is_kept() && !journal.is_due());
        assert_eq!(JournalFile::read(&path).numbers, 4);
        drop(folder);
    }
}
