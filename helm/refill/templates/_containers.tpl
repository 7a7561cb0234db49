{{/* Do containers and volumes of the user's fit beside those of the chart? A cluster would take the StatefulSet, and then make no pod. */}}

{{- define "refill.checkContainers" -}}
{{- range $list := list "initContainers" "sidecars" -}}
{{- range get $.Values $list -}}
{{- if eq (toString .name) "refill" -}}
{{- fail (printf "%s: the container of the chart is called refill; call it something else" $list) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $volumes := concat (list "tmp") (include "refill.secrets" . | fromYaml | keys) -}}
{{- if .Values.pinnedDisk.enabled }}{{ $volumes = append $volumes "pinned" }}{{ end -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "extraVolumes: there is a volume %s already; call it something else" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "extraVolumeMounts: there is no volume %s among extraVolumes" .name) -}}
{{- end -}}
{{- if eq (trimSuffix "/" .mountPath) "/tmp" -}}
{{- fail "extraVolumeMounts: the chart mounts /tmp itself" -}}
{{- end -}}
{{- end -}}
{{- end -}}
