//! The matrix of `nvidia-smi topo -m` (and `-mp`), as people paste it: levels, no addresses.
//!
//! Lines that are no part of it are skipped. What the matrix does not show is left unknown, but for two
//! things that follow: a row that is missing is filled from the columns of the others, and a NIC is on the
//! NUMA node of the GPUs nearest to it.

mod apart;
mod columns;
mod line;
mod matrix;

use std::collections::{BTreeMap, BTreeSet};

use crate::level::Level;
use crate::model::{Drive, GivenLevel, HcaOrigin, NamedGpu, NumaId, RawHca, RawHost};
use crate::source::SourceKind;
use line::Column;
use matrix::Matrix;

const SOURCE: SourceKind = SourceKind::TopoM;

/// Largest text that is read, in bytes. The matrix of 72 GPUs with 72 NICs has some 100 kB.
pub const MAX_TOPO_M_BYTES: usize = 1 << 20;
/// Most columns of GPUs and NICs: a host may have hundreds of virtual functions.
pub const MAX_TOPO_M_COLUMNS: usize = 1024;

/// What a text is whose only matrix is that of peer access.
pub(crate) const P2P: &str = "the matrix of `nvidia-smi topo -p2p`, which tells what GPUs may do and not what lies between; use the \
                              text of `nvidia-smi topo -m`";

/// Why a text holds no matrix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadTopoM(String);

/// Whether a text looks like one with a matrix in it, also one that [`parse`] refuses for what the matrix says.
#[must_use]
pub fn is_topo_m(text: &str) -> bool {
    text.len() <= MAX_TOPO_M_BYTES && Matrix::find(text).map_or(true, |matrix| !matrix.rows.is_empty())
}

/// Whether a text holds the matrix of `nvidia-smi topo -p2p` and none of levels.
pub(crate) fn is_p2p_alone(text: &str) -> bool {
    text.len() <= MAX_TOPO_M_BYTES && Matrix::find(text).is_ok_and(|matrix| matrix.rows.is_empty() && matrix.has_p2p)
}

/// Reads the first matrix of a text that has levels.
///
/// # Errors
/// There is no row of a matrix in it, or it has more columns than any host.
pub fn parse(text: &str) -> Result<RawHost, BadTopoM> {
    if text.len() > MAX_TOPO_M_BYTES {
        return Err(BadTopoM(format!("has more than {MAX_TOPO_M_BYTES} bytes")));
    }
    let matrix = Matrix::find(text)?;
    if matrix.rows.is_empty() && matrix.has_p2p {
        return Err(BadTopoM(P2P.to_owned()));
    }
    if matrix.rows.is_empty() {
        return Err(BadTopoM("has no row of a matrix, such as `GPU0  X  NV12  PXB`".to_owned()));
    }
    Ok(host(matrix))
}

fn host(mut matrix: Matrix) -> RawHost {
    let mut raw = RawHost::new(SOURCE);
    let names = names(&matrix, &mut raw.warnings);
    let levels = levels(&matrix, &mut raw.warnings);
    let numa: Vec<Option<NumaId>> = (0..matrix.columns.len()).map(|column| matrix.numa(column)).collect();
    let mut rowless: Vec<&str> = Vec::new();
    for (place, column) in matrix.columns.iter().enumerate().filter(|(_, column)| column.is_gpu()) {
        let row = matrix.rows.iter().find(|row| row.column == place);
        let affinity = row.map_or("", |row| row.numa.as_str());
        let own = numa.get(place).copied().flatten();
        if own.is_none() && affinity.contains(|c: char| c.is_ascii_digit()) {
            raw.warnings
                .push(format!("{}: NUMA affinity `{affinity}` is no single node, taken as unknown", column.name));
        }
        if row.is_none() {
            rowless.push(&column.name);
        }
        raw.named_gpus.push(NamedGpu { name: column.name.clone(), numa: own });
    }
    if !rowless.is_empty() {
        let (list, has) = (rowless.join(", "), if rowless.len() == 1 { "has" } else { "have" });
        raw.warnings.push(format!("{list}: {has} no row, so that most of the levels are unknown"));
    }
    let nics = matrix.columns.iter().enumerate().filter(|(_, column)| !column.is_gpu() && !column.is_drive());
    let hca = |(place, _): (usize, &Column)| RawHca {
        name: names.get(place).cloned().unwrap_or_default(),
        origin: Some(HcaOrigin::Hardware),
        numa: nic_numa(&matrix, &levels, &numa, place),
        ..RawHca::default()
    };
    raw.hcas = Some(nics.map(hca).collect());
    let drives = matrix.columns.iter().zip(&names).filter(|(column, _)| column.is_drive());
    raw.drives = drives.map(|(_, name)| drive(name)).collect();
    let name = |place: usize| names.get(place).cloned().unwrap_or_default();
    let given = |((a, b), level): (&(usize, usize), &Level)| GivenLevel {
        a: name(*a),
        b: name(*b),
        level: *level,
        source: SOURCE,
    };
    raw.given_levels = levels.iter().map(given).collect();
    raw.warnings.append(&mut matrix.warnings);
    raw
}

fn drive(name: &str) -> Drive {
    Drive { name: name.to_owned(), bdf: None, numa: None, transport: None, netdev: None, source: SOURCE }
}

/// The controller of a namespace: `nvme0` of `nvme0n1`.
fn controller(name: &str) -> &str {
    let is_number = |number: &str| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    name.rsplit_once('n').filter(|(_, number)| is_number(number)).map_or(name, |(controller, _)| controller)
}

/// Names of all columns: GPUs as they are, NICs and drives by the legend.
fn names(matrix: &Matrix, warnings: &mut Vec<String>) -> Vec<String> {
    let mut taken = BTreeSet::new();
    let mut names = Vec::new();
    for column in &matrix.columns {
        let by_legend = matrix.legend.get(&column.name).filter(|_| !column.is_gpu());
        let name = by_legend.unwrap_or(&column.name).as_str();
        let name = if column.is_drive() { controller(name) } else { name };
        if taken.insert(name.to_owned()) {
            names.push(name.to_owned());
        } else {
            warnings.push(format!("the legend names {name} twice, {} keeps its own name", column.name));
            taken.insert(column.name.clone());
            names.push(column.name.clone());
        }
    }
    let is_column = |nic: &&String| matrix.columns.iter().any(|column| column.name == **nic);
    let legend = matrix.legend_nics();
    let absent: Vec<&str> = legend.iter().filter(|nic| !is_column(nic)).map(String::as_str).collect();
    if !absent.is_empty() {
        warnings.push(format!("{}: named by the legend, without a column, left out", absent.join(", ")));
    }
    let nameless: Vec<&str> = names.iter().map(String::as_str).filter(|name| is_placeholder(name)).collect();
    if !nameless.is_empty() {
        let list = nameless.join(", ");
        warnings.push(format!("{list}: placeholders of the matrix, no RDMA devices; add its NIC legend to the text"));
    }
    names
}

/// Whether a NIC goes by its column (`NIC0`), which no RDMA device is called.
pub(crate) fn is_placeholder(name: &str) -> bool {
    line::numbered(name, "NIC")
}

/// Level of each pair of columns, the lower first. Where two rows differ the nearer level is kept: a row
/// can be cut short, but nothing makes devices seem nearer.
fn levels(matrix: &Matrix, warnings: &mut Vec<String>) -> BTreeMap<(usize, usize), Level> {
    let mut levels: BTreeMap<(usize, usize), Level> = BTreeMap::new();
    for row in &matrix.rows {
        for (column, level) in row.levels.iter().enumerate() {
            let Some(level) = level.filter(|_| column != row.column) else { continue };
            let pair = (row.column.min(column), row.column.max(column));
            let known = levels.entry(pair).or_insert(level);
            if *known != level {
                let name = |place: usize| matrix.columns.get(place).map_or("", |column| column.name.as_str());
                warnings.push(format!("{} and {}: the rows say {known} and {level}", name(pair.0), name(pair.1)));
                *known = level.min(*known);
            }
        }
    }
    levels
}

/// NUMA node of the GPUs nearest to a NIC, if these have one in common. SYS tells of no node.
fn nic_numa(
    matrix: &Matrix,
    levels: &BTreeMap<(usize, usize), Level>,
    numa: &[Option<NumaId>],
    nic: usize,
) -> Option<NumaId> {
    let near: Vec<(Level, Option<NumaId>)> = (0..matrix.columns.len())
        .filter(|place| matrix.columns.get(*place).is_some_and(Column::is_gpu))
        .filter_map(|gpu| {
            let level = levels.get(&(gpu.min(nic), gpu.max(nic))).filter(|level| **level < Level::Sys)?;
            Some((*level, numa.get(gpu).copied().flatten()))
        })
        .collect();
    let nearest = near.iter().map(|(level, _)| *level).min()?;
    let mut nodes = near.iter().filter(|(level, _)| *level == nearest).map(|(_, numa)| *numa);
    let first = nodes.next()?;
    nodes.all(|numa| numa == first).then_some(first).flatten()
}
