//! A tenant's protection domains, one on each HCA that it uses.
//!
//! Each is made by whoever needs it first. A driver that hangs there holds up those who need the same domain and nobody
//! else: the table is locked only to look a place up. An HCA that is gone leaves its place closed, since its number is never
//! used again: a job that still has the device makes nothing on it that would outlive the job.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use gdrd_hal::{Hca, HcaError, ProtectionDomain};

use super::lock;
use crate::broker::{FlushLanding, LandingError};
use crate::core::HcaIndex;

/// A tenant's protection domain on one HCA.
pub(super) struct Domain {
    landing: Mutex<Option<Arc<FlushLanding>>>,
    pub(super) pd: Arc<dyn ProtectionDomain>,
}

impl Domain {
    /// Where flushes of the domain's queue pairs land. May block on the driver.
    pub(super) fn landing(&self) -> Result<Arc<FlushLanding>, LandingError> {
        let mut landing = lock(&self.landing);
        if let Some(landing) = &*landing {
            return Ok(Arc::clone(landing));
        }
        let made = Arc::new(FlushLanding::register(&*self.pd)?);
        *landing = Some(Arc::clone(&made));
        Ok(made)
    }
}

/// A domain once it is made; locked while it is.
pub(super) type DomainCell = Arc<Mutex<Option<Arc<Domain>>>>;

/// What a tenant has on an HCA.
enum Place {
    Open(DomainCell),
    Gone,
}

/// A tenant's domains.
#[derive(Default)]
pub(super) struct Domains(Mutex<BTreeMap<HcaIndex, Place>>);

impl Domains {
    /// The domain on an HCA, made where there is none. May block on the driver.
    pub(super) fn on(&self, index: HcaIndex, hca: &dyn Hca) -> Result<Arc<Domain>, HcaError> {
        let cell = match lock(&self.0).entry(index).or_insert_with(|| Place::Open(DomainCell::default())) {
            Place::Open(cell) => Arc::clone(cell),
            Place::Gone => {
                let (hca, reason) = (hca.name().to_owned(), "it was given up".to_owned());
                return Err(HcaError::Gone { hca, reason });
            }
        };
        let mut made = lock(&cell);
        if let Some(domain) = &*made {
            return Ok(Arc::clone(domain));
        }
        let domain = Arc::new(Domain { landing: Mutex::default(), pd: hca.alloc_pd()? });
        *made = Some(Arc::clone(&domain));
        Ok(domain)
    }

    /// Lets go of an HCA that is gone; what there was is for the caller to drop, which may block. Does not block itself.
    pub(super) fn leave(&self, index: HcaIndex) -> Option<DomainCell> {
        match lock(&self.0).insert(index, Place::Gone) {
            Some(Place::Open(cell)) => Some(cell),
            Some(Place::Gone) | None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::broker::tests::fake::Fake;

    /// Against a test that hangs.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Gone, or the domain.
    fn is_gone(domain: Result<Arc<Domain>, HcaError>) -> bool {
        matches!(domain, Err(HcaError::Gone { .. }))
    }

    #[test]
    fn a_driver_that_hangs_while_it_makes_a_domain_holds_up_no_other_hca_nor_its_end() {
        let domains = Arc::new(Domains::default());
        let hung = Fake::default();
        let (entered, enter) = channel();
        let (unblock, blocked) = channel::<()>();
        hung.at_next_call(move || {
            entered.send(()).unwrap();
            blocked.recv().unwrap();
        });
        let maker = std::thread::spawn({
            let domains = Arc::clone(&domains);
            move || domains.on(HcaIndex(0), &hung).map(|domain| Arc::downgrade(&domain))
        });
        enter.recv().unwrap();
        let (tell, told) = channel();
        let others = std::thread::spawn({
            let domains = Arc::clone(&domains);
            move || {
                assert!(domains.on(HcaIndex(1), &Fake::default()).is_ok());
                tell.send(domains.leave(HcaIndex(0)).is_some()).unwrap();
            }
        });
        assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
        others.join().unwrap();
        unblock.send(()).unwrap();
        let late = maker.join().unwrap().unwrap();
        assert!(late.upgrade().is_none(), "what is made on a device that is gone ends with the job");
        assert!(is_gone(domains.on(HcaIndex(0), &Fake::default())));
    }

    #[test]
    fn an_hca_that_was_gone_before_it_was_used_stays_gone() {
        let domains = Domains::default();
        assert!(domains.leave(HcaIndex(3)).is_none());
        assert!(is_gone(domains.on(HcaIndex(3), &Fake::default())));
    }
}
