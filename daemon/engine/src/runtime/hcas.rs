//! The HCAs behind the state machine's indices.
//!
//! A device that is gone leaves its place empty, so that its context is closed with the last object made on it; one
//! that comes back is a new device at a new place, whatever its name.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use gdrd_hal::Hca;

use super::executor::Lane;
use super::{Runtime, lock};
use crate::core::{HcaIndex, Input};

/// The table.
pub(super) struct Hcas {
    places: RwLock<Vec<Option<Arc<dyn Hca>>>>,
    /// Held while one is added, here and in the state machine: places are the same in both.
    adding: Mutex<()>,
}

impl Hcas {
    pub(super) fn new(hcas: Vec<Arc<dyn Hca>>) -> Self {
        Self { places: RwLock::new(hcas.into_iter().map(Some).collect()), adding: Mutex::default() }
    }

    /// `None` for one that is gone.
    pub(super) fn get(&self, index: HcaIndex) -> Option<Arc<dyn Hca>> {
        self.read().get(usize::from(index.0)).cloned().flatten()
    }

    /// Those that are there.
    pub(super) fn all(&self) -> Vec<(HcaIndex, Arc<dyn Hca>)> {
        let index = |at: usize| u16::try_from(at).ok().map(HcaIndex);
        let places = self.read();
        places.iter().enumerate().filter_map(|(at, hca)| Some((index(at)?, hca.clone()?))).collect()
    }

    /// Empties a place.
    fn take(&self, index: HcaIndex) -> Option<Arc<dyn Hca>> {
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        places.get_mut(usize::from(index.0)).and_then(Option::take)
    }

    /// False when there is no number left.
    fn push(&self, hca: Arc<dyn Hca>) -> bool {
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        let has_room = places.len() < usize::from(u16::MAX);
        if has_room {
            places.push(Some(hca));
        }
        has_room
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Option<Arc<dyn Hca>>>> {
        // Each change is one store or push, so a panic elsewhere leaves it whole.
        self.places.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Runtime {
    /// Names of the HCAs that are served.
    pub(crate) fn hca_names(&self) -> Vec<String> {
        self.state().core.host().served_hcas().map(str::to_owned).collect()
    }

    /// Serves one more HCA. False, and the device is dropped, when one of its name is served already.
    pub(crate) fn add_hca(self: &Arc<Self>, hca: Arc<dyn Hca>) -> bool {
        let _adding = lock(&self.hcas.adding);
        let name: Arc<str> = Arc::from(hca.name());
        if self.state().core.host().served_hcas().any(|known| known == &*name) || !self.hcas.push(hca) {
            return false;
        }
        tracing::info!(hca = &*name, "an hca has come");
        self.input(Input::HcaFound { name });
        self.devices.look_again();
        true
    }

    /// Lets go of a device that is gone: of the tenants' domains on it, the broker's queues and the device itself.
    pub(super) fn forget_hca(&self, index: HcaIndex) {
        let device = self.hcas.take(index);
        let domains = self.objects.leave_hca(index);
        self.broker.forget_hca(index);
        self.devices.look_again();
        // One that an error of a call gave away, and no event, may be there still: it is opened anew.
        self.devices.tell_watcher();
        // What ends here asks the driver, which may block.
        self.submit(&self.background, Lane::Hca(index), "close the hca", move || drop((domains, device)));
    }
}
