//! Matrices of which a part is missing or that were broken into lines of one width: what is read is right, and what cannot
//! be told is refused or unknown.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::tables::{Form, print, table};
use common::{case_text, sections};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::error::TopologyError;
use gdrd_topology::level::Level;
use gdrd_topology::model::{Host, NumaId};
use gdrd_topology::read_text;

fn read(text: &str) -> Result<Host, TopologyError> {
    read_text(text, Path::new("paste"), &ReadOptions::default()).map(|snapshot| snapshot.host)
}

fn host(text: &str) -> Host {
    read(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Every matrix of tests/cases as a terminal shows it, tabs made blanks, and its legend.
fn shown(gpu_rows_only: bool) -> Vec<(String, Vec<String>, String)> {
    let of = |(name, lines): (&str, Vec<&str>)| {
        let printed = print(&table(&lines), Form { gpu_rows_only, ..Form::default() });
        let (matrix, legend) = printed.split_once("\n\nNIC Legend:").unwrap();
        (name.to_owned(), matrix.lines().map(expanded).collect(), format!("\n\nNIC Legend:{legend}"))
    };
    sections(&case_text("topo-m.tables")).into_iter().map(of).collect()
}

fn expanded(line: &str) -> String {
    let add = |mut out: String, c: char| {
        if c == '\t' {
            out.push_str(&" ".repeat(8 - out.len() % 8));
        } else {
            out.push(c);
        }
        out
    };
    line.chars().fold(String::new(), add)
}

type Levels = BTreeMap<(String, String), Level>;

fn levels(host: &Host) -> Levels {
    host.given_levels.iter().map(|given| ((given.a.clone(), given.b.clone()), given.level)).collect()
}

fn nodes(host: &Host) -> BTreeMap<String, Option<NumaId>> {
    host.gpus.iter().map(|gpu| (gpu.name.clone(), gpu.numa)).collect()
}

/// Asserts that a host says nothing else than the whole one, but for devices that go by their column.
fn assert_nothing_is_wrong(what: &str, text: &str, host: &Host, right: &Host) {
    let all = levels(right);
    for ((a, b), level) in levels(host) {
        assert_eq!(all.get(&(a.clone(), b.clone())), Some(&level), "{what}: {a} and {b}\n{text}");
    }
    for (gpu, numa) in nodes(host) {
        let whole = nodes(right).get(&gpu).copied();
        assert!(numa.is_none() || whole == Some(numa), "{what}: {gpu} on {numa:?}, not {whole:?}\n{text}");
    }
}

/// With and without the header and half of the rows.
#[test]
fn of_lines_cut_at_any_width_nothing_wrong_is_read() {
    let mut read_of_cut = 0;
    let all = [false, true].map(shown).concat();
    for (at, (name, lines, legend)) in all.iter().enumerate() {
        let right = host(&format!("{}{legend}", lines.join("\n")));
        for (first, rows) in
            [(0, lines.len()), (0, 1 + (lines.len() - 1) / 2), (1, lines.len() - 1), (1, lines.len() / 2)]
        {
            for width in (12 + at % 11..lines[0].len() + 24).step_by(11) {
                let cut = |line: &String| line.get(..width.min(line.len())).unwrap_or_default().to_owned();
                let text = lines.iter().skip(first).take(rows).map(cut).collect::<Vec<_>>().join("\n");
                let text = format!("{text}{legend}");
                if let Ok(host) = read(&text) {
                    read_of_cut += 1;
                    assert_nothing_is_wrong(&format!("{name} at {width}, {rows} rows"), &text, &host, &right);
                }
            }
        }
    }
    assert!(read_of_cut > 500, "{read_of_cut}");
}

#[test]
fn of_lines_wrapped_at_any_width_nothing_wrong_is_read() {
    for (name, lines, legend) in shown(false) {
        let right = host(&format!("{}{legend}", lines.join("\n")));
        for width in (40..lines[0].len().max(41)).step_by(7) {
            for keeps_blanks in [true, false] {
                let pieces = lines.iter().flat_map(|line| line.as_bytes().chunks(width));
                let pieces = pieces.map(|piece| std::str::from_utf8(piece).unwrap());
                let text = pieces.map(|piece| if keeps_blanks { piece } else { piece.trim_end() });
                let text = format!("{}{legend}", text.collect::<Vec<_>>().join("\n"));
                if let Ok(host) = read(&text) {
                    assert_nothing_is_wrong(&format!("{name} at {width}"), &text, &host, &right);
                    assert!(!host.gpus.is_empty(), "{name} at {width}\n{text}");
                }
            }
        }
    }
}

/// Without NVLinks nothing but the header or the legend tells which columns are GPUs.
#[test]
fn of_a_header_that_ends_within_a_word_the_rest_counts() {
    let rows = "GPU0     X      SYS     SYS     PIX     SYS     0\nGPU1    SYS      X      SYS     SYS     PIX     0\n";
    for (header, told) in [
        ("        GPU0    GPU1    GPU2    NIC0    NIC1    C", "`C`: left out"),
        ("        GPU0    GPU1    GPU2    NIC0    NI", "`NI`: taken as NIC1"),
        ("        GPU0    GPU1    GPU2    N", "`N`: taken as NIC0"),
    ] {
        let host = host(&format!("{header}\n{rows}\nNIC0: mlx5_0\nNIC1: mlx5_1\n"));
        assert_eq!(host.gpus.len(), 3, "{header}");
        for nic in 0..2 {
            let pair = (format!("GPU{nic}"), format!("mlx5_{nic}"));
            assert_eq!(levels(&host).get(&pair), Some(&Level::Pix), "{header}");
        }
        assert!(nodes(&host).values().all(Option::is_none), "0 begins the list of CPUs: {header}");
        assert!(host.warnings.iter().any(|warning| warning.contains(told)), "{:?}", host.warnings);
    }
}

#[test]
fn rows_alone_are_read_where_a_legend_or_a_nic_tells_how_many_gpus_there_are() {
    let rows = "GPU0\t X \tSYS\tSYS\tPIX\tSYS\t0-7\t0\nGPU1\tSYS\t X \tSYS\tSYS\tPIX\t0-7\t0\n";
    let legend = host(&format!("{rows}\nNIC0: mlx5_0\nNIC1: mlx5_1\n"));
    assert_eq!(levels(&legend)[&("GPU1".to_owned(), "mlx5_1".to_owned())], Level::Pix);
    let nic = host(&format!("{rows}NIC0\tPIX\tSYS\tSYS\t X \tSYS\n"));
    assert_eq!(levels(&nic)[&("GPU1".to_owned(), "NIC1".to_owned())], Level::Pix);
    for host in [legend, nic] {
        assert_eq!((host.gpus.len(), host.hcas.len()), (3, 2));
        assert!(host.warnings.iter().any(|warning| warning.contains("the rest is assumed")), "{:?}", host.warnings);
    }
    let alone = host("GPU0\t X \tSYS\t0-7\nGPU1\tSYS\t X \t0-7\n");
    assert_eq!((alone.gpus.len(), alone.hcas.len()), (2, 0));
    let error = read(rows).unwrap_err().to_string();
    assert!(error.contains("names 0 of 5 columns") && error.contains("add the header"), "{error}");
}

#[test]
fn lines_broken_within_a_word_are_refused_with_the_reason() {
    let header = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\n";
    let row = "GPU1\tSYS\t X \tSYS\t0-7\n";
    for (text, reason) in [
        ("\tGPU0\tGPU1\tNIC0\tNI\nC1\tCPU Affinity\nGPU0\t X \tSYS\tPIX\tSYS\n".to_owned(), "at `NI`"),
        ("\tGPU0\tGPU1\tNIC\n8 NIC9 CPU Affinity\nGPU0\t X \tSYS\tPIX\tSYS\n".to_owned(), "at `8`"),
        (format!("{header}GPU0\t X \tSY\nS\tPIX\n{row}"), "row GPU0 is broken within a word, `SY` and `S`"),
        (format!("{header}GPU0\t X \tNV1\n8\tPIX\n{row}"), "`NV1` and `8`"),
        ("\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tSYS\tPIX\n".to_owned(), "row GPU0 has no column"),
        ("\tNIC0\tNIC1\nNIC0\t X \tSYS\nNIC1\tSYS\t X \n".to_owned(), "names no GPU"),
    ] {
        let error = read(&text).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}\n{text}");
    }
}
