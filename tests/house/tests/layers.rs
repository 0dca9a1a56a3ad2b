//! The layer table of `gdrd_house::layers` against this workspace.

use gdrd_house::{layers, root, workspace};

#[test]
fn every_arrow_of_this_workspace_is_in_the_layer_table() {
    let workspace = workspace::read(&root()).expect("cargo metadata reads this workspace");
    let members: Vec<&str> = workspace.members.iter().map(|member| member.name.as_str()).collect();
    assert_eq!(layers::violations(layers::LAYERS, &members, &workspace.arrows), Vec::<String>::new());
}
