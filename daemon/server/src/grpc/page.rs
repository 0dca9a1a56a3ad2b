//! Pages of lists: where one starts, and how much goes into it.

use prost::Message;
use tonic::Status;

use crate::limits::MAX_PAGE_BYTES;
use crate::status::bad_argument;

/// Longest page token: the digits of a 64-bit id.
const MAX_PAGE_TOKEN_BYTES: usize = 20;

/// The id that a page token names; `None` for the first page.
///
/// # Errors
/// `InvalidArgument` for a token that no response had.
pub(super) fn start(page_token: &str) -> Result<Option<u64>, Status> {
    if page_token.is_empty() {
        return Ok(None);
    }
    let id = (page_token.len() <= MAX_PAGE_TOKEN_BYTES).then(|| page_token.parse().ok()).flatten();
    id.map(Some).ok_or_else(|| bad_argument("page_token is not one that a response gave; start without it"))
}

/// The rows that fit one response, and the token of the next page, empty on the last.
pub(super) fn cut<T: Message>(rows: Vec<(u64, T)>, next: Option<u64>) -> (Vec<T>, String) {
    let mut len_bytes = 0;
    let mut page = Vec::with_capacity(rows.len());
    for (id, row) in rows {
        len_bytes += row.encoded_len();
        // A page has one row at least, so that every list ends.
        if len_bytes > MAX_PAGE_BYTES && !page.is_empty() {
            return (page, id.to_string());
        }
        page.push(row);
    }
    (page, next.map(|id| id.to_string()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use gdrd_proto::v1::Lease;

    use super::*;

    fn row(id: u64, label_bytes: usize) -> (u64, Lease) {
        (id, Lease { lease_id: id, label: "x".repeat(label_bytes), ..Lease::default() })
    }

    #[test]
    fn short_rows_keep_the_token_of_the_engine() {
        let (page, next) = cut(vec![row(1, 10), row(2, 10)], Some(3));
        assert_eq!((page.len(), next.as_str()), (2, "3"));
        assert_eq!(cut(vec![row(1, 10)], None).1, "");
    }

    #[test]
    fn long_rows_end_the_page_early_and_nothing_is_lost() {
        let (page, next) = cut((1..=5).map(|id| row(id, MAX_PAGE_BYTES / 2)).collect(), Some(9));
        assert_eq!(next, (page.len() + 1).to_string());
        assert!(!page.is_empty());
    }

    #[test]
    fn row_longer_than_a_page_stands_alone() {
        let (page, next) = cut(vec![row(1, MAX_PAGE_BYTES * 2), row(2, 1)], None);
        assert_eq!((page.len(), next.as_str()), (1, "2"));
    }

    #[test]
    fn tokens_are_ids_and_nothing_else() {
        assert_eq!(start("").expect("first page"), None);
        assert_eq!(start("18446744073709551615").expect("an id"), Some(u64::MAX));
        assert!(start("x").is_err());
        assert!(start(&"1".repeat(4096)).is_err());
    }
}
